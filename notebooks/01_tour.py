# %% [markdown]
# # A tour of lowcomm
#
# You know JAX and optax. lowcomm adds one thing to them: optax transformations that *talk*, along a named axis, to the other workers. This notebook
#
# 1. turns a plain optax loop into eight workers, and changes their method in one line;
# 2. shows what travels, when it travels, and how you can be sure of it;
# 3. plots loss against steps and against bytes;
# 4. writes a new method from the parts, puts it to the laws, and breaks it to see a law catch it.
#
# It needs a CPU, `pip install '.[experiments,dev]'` from the clone, and less than a minute.

# %%
import html
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import HTML, display
from sklearn.datasets import load_digits

import lowcomm as lc
from lowcomm import testing

# Before JAX starts: eight simulated devices, and the CPU even where there is more.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

# %% [markdown]
# ## 1. From one worker to eight
#
# The task is small enough to be seen whole: 1797 handwritten digits of 8 × 8 pixels, and a network with one hidden layer. Each of the eight workers has 180 images of its own; 357 are held out. `batch(t)` depends on the step alone and is stacked, `[workers, 32, …]`.

# %%
K, STEPS = 8, 200

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = np.random.default_rng(0).permutation(len(images))
own, rest = order[: 180 * K].reshape(K, 180), order[180 * K :]
held_out = images[rest], labels[rest]


def batch(t):
    rng = np.random.default_rng([0, t])
    chosen = np.take_along_axis(own, rng.integers(180, size=(K, 32)), axis=1)
    return images[chosen], labels[chosen]


def logits(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params, batch):
    x, y = batch
    losses = optax.losses.softmax_cross_entropy_with_integer_labels
    return losses(logits(params, x), y).mean()


@jax.jit
def accuracy(params):
    x, y = held_out
    return (logits(params, x).argmax(-1) == y).mean()


params = {
    "w1": jax.random.normal(jax.random.key(0), (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jnp.zeros((64, 10)),
    "b2": jnp.zeros(10),
}
sgd = optax.sgd(1.0)
print(f"{sum(x.size for x in params.values())} parameters")

# %% [markdown]
# Here is the loop you would write without lowcomm. One model sees the 8 × 32 images of a step as one batch of 256.


# %%
@jax.jit
def plain_step(params, state, batch):
    grads = jax.grad(loss)(params, batch)
    updates, state = sgd.update(grads, state)
    return optax.apply_updates(params, updates), state


plain, state = params, sgd.init(params)
for t in range(STEPS):
    x, y = batch(t)
    plain, state = plain_step(plain, state, (x.reshape(256, 64), y.reshape(256)))
print(f"accuracy {accuracy(plain):.1%}")

# %% [markdown]
# Here it is with eight workers. `local_step` is the step of *one* worker, who sees its own 32 images and nothing else. `spread` runs it as all of them: parameters, state and batch are stacked along a first axis (`0`), the step number is shared (`None`). Without a mesh the workers are virtual, by `vmap`; section 2 puts them on devices. Whatever they have in common comes from `tx`.


# %%
def train(tx):
    step = jax.jit(lc.spread(lc.local_step(loss, tx), in_axes=(0, 0, 0, None)))
    stacked = lc.stack(params, K)  # [K, ...], a copy for each worker
    state = lc.init(tx, stacked)
    for t in range(STEPS):
        stacked, state, _ = step(stacked, state, batch(t), t)
    return stacked, lc.spread(lc.consensus)(state, stacked)


stacked, _ = train(lc.data_parallel(sgd))

# %% [markdown]
# `data_parallel(sgd)` is `optax.chain(lc.mean(), sgd)`: the mean gradient, then sgd. The mean over eight workers of the mean over 32 images is the mean over 256, so this must be the plain loop again, up to rounding:

# %%
one = lc.unstack(stacked)  # worker 0's part, no first axis
apart = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), plain, one)
print("the same model to four digits:", max(apart.values()) < 1e-4)

# %% [markdown]
# Any other method is another line. A bare `sgd` is a method as well: eight workers who never talk.
#
# At a given moment workers may hold different parameters. `consensus` is the model that they stand for: the common starting point of the round where the method keeps one (DiLoCo's anchor), the mean of their parameters otherwise. Evaluate and export that one.

# %%
METHODS = {
    "sgd": sgd,
    "data_parallel": lc.data_parallel(sgd),
    "diloco": lc.diloco(sgd, period=20),
    "selsync": lc.selsync(sgd, threshold=0.2),
}
print("                a worker's model   consensus")
for name, tx in METHODS.items():
    stacked, models = train(tx)
    theirs, ours = jax.vmap(accuracy)(stacked).mean(), accuracy(lc.unstack(models))
    print(f"{name:14} {theirs:17.1%} {ours:11.1%}")

# %% [markdown]
# 180 images are not enough for a worker alone, and the mean of eight models that went their own ways is worse still. DiLoCo talks after every 20th step, SelSync when the norm of some worker's gradient is changing; both end within a percent of data-parallel. (The learning rate is 1.0 for all. Section 3 says how it was chosen.)

# %% [markdown]
# ## 2. What travels, and when
#
# `traffic` reads the program of one worker and lists its collectives, without running it. The step is an argument of the method, not a counter inside it. So where you hand over a Python integer, the method knows at trace time whether it is a step to talk at. DiLoCo with a period of 20 talks after step 19, and in the program of step 18 there is nothing to list:

# %%
diloco = METHODS["diloco"]


def what_travels(tx, t):
    one = params, tx.init(params), lc.unstack(batch(0))  # what one worker holds
    return lc.traffic(lc.local_step(loss, tx), *one, t, workers=K)


for title, t in {"step 18": 18, "step 19": 19, "a traced step": jnp.int32(0)}.items():
    print(title, what_travels(diloco, t).table(), sep="\n", end="\n\n")

# %% [markdown]
# One row per collective; bytes are what a worker hands to it. Where the step is traced, as in `train` above or in a `lax.scan`, the program has to serve every step, and the collectives stand in a conditional. The guard `1:1` means the first conditional, branch 1. `traffic(...).bytes_always` leaves such rows out, `bytes_max` counts them.
#
# SelSync cannot know beforehand. Every worker looks at its own gradient, and they agree by a maximum over one number, 4 bytes a step:

# %%
print(what_travels(METHODS["selsync"], 100).table())

# %% [markdown]
# `fit` is the loop of section 1 with a known step and with the bytes counted. It compiles one program for each kind of step, and no more. (`counted_step` is one turn of it, for a loop of your own.)

# %%
run = lc.fit(loss, diloco, params, batch, steps=60, workers=K)
for program in run.programs:
    print(f"{program.steps} steps that send {program.traffic.bytes_always} bytes")
print("bytes after each step:", run.payload[15:25], "...", run.bytes, "in all")

# %% [markdown]
# ### Is it really so?
#
# A method asks for collectives; what the machine does is up to the compiler. So look at what XLA made of it. Below, both kinds of step are compiled for eight (simulated) devices, and the collectives of the optimized program are marked, between their neighbours. To go from virtual workers to devices is to pass `mesh=`; inside it is `shard_map`.

# %%
mesh = lc.worker_mesh(K)


def compile_step(tx, t):
    """Step ``t`` of all workers, its arguments, and the traffic of one worker."""
    worker = lc.local_step(loss, tx)
    step_t = lambda params, state, batch: worker(params, state, batch, t)
    stacked = lc.stack(params, K, mesh=mesh)
    args = stacked, lc.init(tx, stacked, mesh=mesh), batch(t)
    metered = lc.spread(lc.meter(step_t), mesh=mesh)  # it also counts, see below
    return jax.jit(metered).lower(*args).compile(), args, what_travels(tx, t)


def show(title, program):
    text = program.as_text()
    lines = text[text.index("\nENTRY") :].strip().splitlines()[1:-1]
    # Without origins and memory layouts, which would fill the page.
    lines = [re.sub(r", (metadata|backend_config|sharding)=.*", "", x) for x in lines]
    lines = [html.escape(re.sub(r"\](\{[\d,]*\})", "]", x)) for x in lines]
    talks = re.compile(r" (all-|reduce-scatter|collective-)\S*\(")
    found = [i for i, line in enumerate(lines) if talks.search(line)]
    shown = []
    for i, line in enumerate(lines):
        near = min((abs(i - j) for j in found), default=9)
        if near <= 2:
            shown.append(f"<b><mark>{line}</mark></b>" if near == 0 else line)
        elif shown[-1:] != ["  ..."]:
            shown.append("  ...")
    shown = "<pre>" + "\n".join(shown) + "</pre>" if found else ""
    title = f"{title}: {len(lines)} instructions, of them collectives: {len(found)}"
    display(HTML(f"<p><b>{title}</b></p>{shown}"))


silent, sync = compile_step(diloco, 18), compile_step(diloco, 19)
show("Step 18", silent[0])
show("Step 19", sync[0])

# %% [markdown]
# Silence is compiled: the program of step 18 has no collective and no conditional. In that of step 19 the compiler has packed the four arrays into one all-reduce.
#
# This can be counted in four ways that know little of each other: the formula of the parts (`payload_bytes`), the program as traced (`traffic`), the program as compiled (`compiled_traffic`), and while it runs (`meter`). They must agree to the byte.

# %%
dense = sum(x.nbytes for x in params.values())
top_k_bytes = lc.payload_bytes(lc.top_k(0.02), params)
sign_bytes = lc.payload_bytes(lc.sign(), params)
CASES = {
    "diloco, step 18": (0, silent),
    "diloco, step 19": (dense, sync),
    "top_k_sgd": (top_k_bytes, compile_step(lc.top_k_sgd(sgd, fraction=0.02), 0)),
    "sign_sgd": (sign_bytes, compile_step(lc.sign_sgd(sgd), 0)),
}
print("                 formula  traced  compiled  metered")
for name, (formula, (program, args, traced)) in CASES.items():
    compiled = lc.compiled_traffic(program, mesh=mesh).bytes_always
    _, counts = program(*args)  # [K, rows]
    metered = traced.bytes(counts[0])
    print(f"{name:15}{formula:9}{traced.bytes_always:8}{compiled:10}{metered:9}")
    assert formula == traced.bytes_always == compiled == metered

# %% [markdown]
# ## 3. Loss against bytes
#
# Now train with each method and note, every ten steps, the loss of the consensus on the held-out images and the bytes that a worker has sent so far.


# %%
@jax.jit
def held_out_loss(state, stacked):
    return loss(lc.unstack(lc.spread(lc.consensus)(state, stacked)), held_out)


def curve(tx):
    steps, losses = [], []

    def look(t, stacked, state, metrics):
        if (t + 1) % 10 == 0:
            steps.append(t + 1)
            losses.append(float(held_out_loss(state, stacked)))

    run = lc.fit(loss, tx, params, batch, steps=STEPS, workers=K, on_step=look)
    return run, steps, losses


COLORS = ["#222222", "#CC6677", "#117733", "#88CCEE", "#332288", "#DDAA33"]


def plot(curves):
    _, (by_step, by_byte) = plt.subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    by_step.set_prop_cycle(color=COLORS)
    for name, (run, steps, losses) in curves.items():
        sent = np.cumsum(run.payload)[np.array(steps) - 1]
        heard = sent > 0  # zero has no place on a logarithmic axis
        (line,) = by_step.plot(steps, losses, label=name)
        color = line.get_color()
        by_byte.plot(sent[heard], np.array(losses)[heard], color=color)
        by_byte.plot(sent[-1], losses[-1], "o", ms=5, color=color)
    by_step.set(xlabel="steps", ylabel="held-out loss of the consensus", yscale="log")
    by_byte.set(xlabel="bytes sent by each worker", xscale="log", xlim=(1e3, 1e7))
    by_byte.axvline(dense, color="gray", lw=1, ls=":")
    by_byte.text(1.1 * dense, 2.2, "the model, once", color="gray", fontsize=8)
    by_step.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    by_step.minorticks_off()
    for panel in (by_step, by_byte):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    by_step.legend(frameon=False, fontsize=9)
    plt.show()


curves = {
    "data_parallel": curve(lc.data_parallel(sgd)),
    "diloco, period 20": curve(lc.diloco(sgd, period=20)),
    "selsync, threshold 0.2": curve(lc.selsync(sgd, threshold=0.2)),
    "top_k_sgd, 2 %": curve(lc.top_k_sgd(sgd, fraction=0.02)),
    "sign_sgd": curve(lc.sign_sgd(sgd)),
}
plot(curves)

# %% [markdown]
# Step by step the five come down together, more or less; byte by byte a factor of 30 lies between the first and the last. (SelSync's vertical line: nearly all its bytes go into the first 25 steps, a warm-up in which it always talks.)
#
# That is what the figure shows. It does not show which method is better. It is one seed of a task that 200 steps solve, and differences of 0.02 are noise. All use one learning rate, 1.0, the best of 0.1, 0.2, 0.5, 1 and 2 for data-parallel, picked on the very images that are held out here; nothing else was tuned. And bytes are not seconds. `python -m experiments.compare` takes a rate tuned for each method, repeats seeds and prices a link; the README has its table.

# %% [markdown]
# ## 4. A method of your own
#
# There are four kinds of parts. A *compressor* says what of an array travels, an *exchange* how the workers combine it, a *trigger* when they talk, and a *verb* puts these around an inner optimizer: `average` exchanges the parameters, `rounds` the displacements from a common anchor.
#
# Here is an idea. Why talk when nobody has moved? Let the workers go until one of them is some `distance` away from the anchor, but for no more than `cap` steps. Then send the displacements, one bit an entry, and remember what the bits left out (error feedback).


# %%
def signs_on_demand(inner, *, distance, cap, axis=lc.AXIS):
    when = lc.any_of(lc.drift_exceeds(distance), lc.every(cap))
    signs = lc.error_feedback(lc.sign(), axis=axis)
    outer = optax.sgd(1.0)  # the anchor goes where the exchange says
    return lc.rounds(inner, outer, exchange=signs, when=when, axis=axis)


mine = curve(signs_on_demand(sgd, distance=2.5, cap=25))
plot(curves | {"signs_on_demand": mine})
run, *_ = mine
print("syncs after steps", *np.flatnonzero(run.payload > 4))
print(f"{run.bytes} bytes sent by each worker; the model has {dense}")

# %% [markdown]
# It talks every third step while the model is learning and every tenth or twentieth when it has learned. In the whole run a worker sends less than the size of the model. Before you write the paper, take the idea apart: with the same signs, is a plain clock as good? And at another learning rate?


# %%
def signs_by_clock(inner, *, period):
    signs = lc.error_feedback(lc.sign())
    return lc.rounds(inner, optax.sgd(1.0), exchange=signs, when=lc.every(period))


for rate in (1.0, 2.0):
    inner = optax.sgd(rate)
    trials = {
        "on demand": signs_on_demand(inner, distance=2.5, cap=25),
        "every 7th": signs_by_clock(inner, period=7),
    }
    for name, tx in trials.items():
        run, _, losses = curve(tx)
        syncs = (run.payload > 4).sum()
        print(f"rate {rate}, {name}: {syncs} syncs, held-out loss {losses[-1]:.3f}")

# %% [markdown]
# At rate 1.0 the trigger earns nothing: the signs do the work, and a clock is simpler. At rate 2.0 workers go too far in seven steps; those on demand meet twice as often and learn, those on the clock fall behind. Whether that holds beyond one seed of one task is for a real comparison to say. That it is worth asking took two lines.
#
# ### The laws
#
# Does it do what every method must do? `testing.check` runs it on a small problem in which four workers pull in different directions, and asks one law after the other. Here it asks those that take a moment; all eighteen, without `only=`, take about half a minute on two cores. (The problem has other units than ours, hence another distance.)

# %%
QUICK = ["runs", "compiles once", "types constant", "resume", "zero gradients"]
QUICK += ["copies", "learns", "workers agree"]
method = lambda inner: signs_on_demand(inner, distance=64.0, cap=8)
report = testing.check(method, only=QUICK)
assert not report.failed

# %% [markdown]
# Now break it: a sum in the place of a mean. It is quickly written, and it is the kind of mistake that a loss does not tell you, since it learns all the same.


# %%
def summed(inner):
    total = lambda tree, params: jax.tree.map(lambda x: jax.lax.psum(x, lc.AXIS), tree)
    exchange = optax.stateless(total)
    return lc.rounds(inner, optax.sgd(1.0), exchange=exchange, when=lc.every(4))


report = testing.check(summed, only=QUICK)

# %% [markdown]
# With four workers the anchor's first step is four times too long, and of these laws `copies` is the one that sees it. In a test of yours all this is one line, `assert not testing.check(method).failed`.
#
# The other classic is a trigger by which every worker decides for itself. With virtual workers it seems to work. On a cluster those who talk wait forever for those who do not. lowcomm refuses such a program when it is traced, on whatever it runs:


# %%
def selfish(inner):
    far = lambda drift: optax.global_norm(drift) > 64.0  # of this worker alone
    when = lc.Trigger(lambda params: (), lambda state, *, drift, **_: (far(drift), ()))
    return lc.rounds(inner, optax.sgd(1.0), when=when)


report = testing.check(selfish, only=["runs"])

# %% [markdown]
# ## 5. Where to go next
#
# - The README: the parts in one table, what ten methods send and what it buys, and how a method of yours enters the catalogue, where the laws and the comparison find it.
# - `python -m experiments.compare --algorithms data_parallel,diloco --out runs/x` compares methods with several seeds on real data, against steps, bytes and predicted seconds. `--help` lists tasks, splits and links.
# - `python -m experiments.run` trains one method, with checkpoints, and goes on where it was interrupted.
# - `help(lc.diloco)`, or any other: the equation, what is sent and when, a small example and the reference.
