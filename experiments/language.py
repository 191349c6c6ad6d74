"""Predict the next byte of text: cross entropy in nats to learn and to judge.

The held-out loss is a mean over bytes, so that its exponential is the perplexity per
byte; divided by ln 2 it is bits per byte. Every byte of a window counts, also the first
ones, which have little before them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from . import text
from .splits import Split, stream
from .task import ALL, PyTree, Task
from .transformer import LanguageModel

CORPORA = {"stdlib-lm": text.stdlib, "kjv-lm": text.king_james}


def language_task(
    name: str,
    corpus: text.Corpus,
    model: LanguageModel,
    *,
    workers: int,
    batch_size: int,
    split: Split,
    length: int = 64,
    seed: int = 0,
    judged: int = 512,
    tuning: bool = False,
) -> Task:
    """Learn the bytes of a corpus in windows of ``length``.

    ``split`` shares the windows out by the source that each is from. A batch is
    ``uint8[workers, batch_size, length]``. The judge reads the same ``judged`` held-out
    windows every time, evenly spaced over all of them, and gives ``loss`` in nats per
    byte and ``perplexity``; with ``tuning`` it reads about as many others. ``sample``
    is :func:`sample` of this model. The task's name ends in the corpus's, with the hash
    of its bytes.

    Raises ``ValueError`` where the windows are too few for the workers or for a batch,
    or do not fit a held-out block.

    Example:
        >>> from experiments.splits import iid
        >>> zeros = text.corpus("zeros", {"a": bytes(10 * text.BLOCK)})
        >>> model = LanguageModel(width=8, layers=1, heads=2)
        >>> task = language_task(
        ...     "zeros", zeros, model, workers=2, batch_size=3, split=iid, length=16
        ... )
        >>> task.batches(0).shape
        (2, 3, 16)
        >>> params = task.init(jax.random.key(0))
        >>> {key: round(value, 2) for key, value in task.evaluate(params).items()}
        {'loss': 5.55, 'perplexity': 256.0}
    """
    train, held_out = text.windows(corpus, length)
    rows = split(train.sources, workers, np.random.default_rng(seed))
    positions = stream(rows, batch_size, seed=seed)
    last = len(held_out.starts) - 1
    chosen = np.unique(np.linspace(0, last, judged).round().astype(int))
    if tuning:  # what is chosen by these has not seen those of a comparison
        chosen = np.setdiff1d((chosen[1:] + chosen[:-1]) // 2, chosen)
    judge = _read(corpus, held_out.starts[chosen], length)

    @jax.jit
    def init(key):
        return model.init(key, judge[:1])

    def batches(step, workers=ALL):
        return _read(corpus, train.starts[positions(step, workers)], length)

    return Task(
        f"{name}, {corpus.name}",
        init,
        partial(_cross_entropy, model),
        batches,
        partial(_judge, model, judge),
        sample=partial(sample, model, context=length),
    )


def sample(
    model: LanguageModel,
    params: PyTree,
    prompt: str = "",
    length: int = 200,
    *,
    key: jax.Array,
    temperature: float = 0.8,
    context: int = 64,
) -> str:
    """The prompt and ``length`` more bytes, each drawn given the last ``context - 1``.

    Odds are proportional to ``exp(logits / temperature)``; at 0 the likeliest byte is
    taken. What is no text, such as a broken UTF-8 sequence or a control character,
    is shown as the replacement character.

    Raises ``ValueError`` for a negative temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"the temperature cannot be {temperature}: give 0 or more")
    given = np.frombuffer(prompt.encode(), np.uint8)
    # Room for a whole window at every place.
    written = np.zeros(len(given) + length + context, np.uint8)
    written[: len(given)] = given
    places = len(given) + np.arange(length)
    params = jax.device_get(params)
    written = _write(model, context, params, written, places, key, temperature)
    return printable(bytes(np.asarray(written)[:-context]))


def printable(raw: bytes) -> str:
    r"""Bytes as text that a terminal can be given.

    Example:
        >>> printable("Æ\n".encode() + b"\xff\x1b[2J")
        'Æ\n��[2J'
    """
    decoded = raw.decode(errors="replace")
    shown = lambda character: character.isprintable() or character in "\n\t"
    return "".join(c if shown(c) else "\N{REPLACEMENT CHARACTER}" for c in decoded)


@partial(jax.jit, static_argnums=(0, 1))
def _write(
    model: LanguageModel,
    context: int,
    params: PyTree,
    written: jax.Array,
    places: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    def one(written, place):
        # The longest window that ends at the place, or the first, in which what lies
        # behind the place has no effect.
        start = jnp.maximum(place - context + 1, 0)
        window = lax.dynamic_slice(written, (start,), (context,))
        logits = jnp.asarray(model.apply(params, window[None]))[0, place - start]
        # The largest of logits with noise of Gumbel's distribution is a draw.
        noise = jax.random.gumbel(jax.random.fold_in(key, place), logits.shape)
        drawn = jnp.argmax(logits + temperature * noise)
        return written.at[place].set(drawn.astype(written.dtype)), None

    return lax.scan(one, written, places)[0]


# Jitted, so that a loop which traces its step for each kind of step, for each method
# and for its bytes traces the model once.
@partial(jax.jit, static_argnums=0)
def _cross_entropy(model: LanguageModel, params: PyTree, batch: jax.Array) -> jax.Array:
    logits = jnp.asarray(model.apply(params, batch), jnp.float32)
    labels = jnp.asarray(batch, jnp.int32)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _judge(
    model: LanguageModel, judge: np.ndarray, params: PyTree, *, at_once: int = 64
) -> dict[str, float]:
    # Parameters that come from a mesh would be evaluated once by each of its devices.
    params = jax.device_get(params)
    parts = np.split(judge, range(at_once, len(judge), at_once))
    each = [float(_cross_entropy(model, params, part)) for part in parts]
    loss = float(np.average(each, weights=[len(part) for part in parts]))
    with np.errstate(over="ignore"):  # an infinite perplexity is no error
        return {"loss": loss, "perplexity": float(np.exp(loss))}


def _read(corpus: text.Corpus, starts: np.ndarray, length: int) -> np.ndarray:
    return corpus.text[starts[..., None] + np.arange(length)]
