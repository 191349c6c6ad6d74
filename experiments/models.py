"""Small image classifiers without batch statistics, written for one example's batch.

No batch normalization: a worker's running statistics would be a second thing to
communicate, and averaging them is not what any method here says it sends.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

# Residual branches start small, which takes the place of a norm in every block.
_BRANCH = nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")


def _head(classes: int) -> nn.Dense:
    """The last layer, zero at first: all odds are equal, the loss is ln(classes)."""
    return nn.Dense(classes, kernel_init=nn.initializers.zeros, name="head")


class MLP(nn.Module):
    """One hidden layer over flattened pixels, ``[n, h, w, 1] -> [n, classes]``."""

    hidden: int = 32
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        x = x.reshape(len(x), -1)
        return _head(self.classes)(nn.relu(nn.Dense(self.hidden)(x)))


class PatchMixer(nn.Module):
    """An MLP-Mixer of dense layers only, ``[n, h, w, c] -> [n, classes]``.

    Patches become tokens; each block mixes first along the tokens, then along the
    channels. Nothing but matrix products, so that ``vmap`` over workers and
    ``lax.scan`` over steps cost what their arithmetic costs. Two things differ from the
    original: ReLU for GELU, and one norm after pooling instead of two in every block,
    which made half of the time of a step on a CPU.

    References:
        Tolstikhin et al., `MLP-Mixer: An all-MLP Architecture for Vision
        <https://arxiv.org/abs/2105.01601>`_, 2021, section 2.
    """

    patch: int = 7
    width: int = 48
    token_hidden: int = 32
    channel_hidden: int = 96
    blocks: int = 2
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images whose sides are multiples of ``patch``."""
        x = nn.Dense(self.width)(_patches(x, self.patch))  # [n, tokens, width]
        tokens = x.shape[1]
        for _ in range(self.blocks):
            mixed = nn.relu(nn.DenseGeneral(self.token_hidden, axis=1)(x))
            mixed = nn.Dense(tokens, kernel_init=_BRANCH)(mixed)  # [n, width, tokens]
            x = x + jnp.swapaxes(mixed, 1, 2)
            mixed = nn.relu(nn.Dense(self.channel_hidden)(x))
            x = x + nn.Dense(self.width, kernel_init=_BRANCH)(mixed)
        return _head(self.classes)(nn.LayerNorm()(x.mean(1)))


class SmallCNN(nn.Module):
    """Two strided convolutions and two dense layers, ``[n, h, w, c] -> [n, classes]``.

    Strides take the place of pooling, whose gradient made a step five times slower on
    a CPU.

    Note:
        On a CPU a convolution inside ``lax.scan`` or another loop of XLA is about
        twelve times slower than the same convolution in a jitted step: call the step
        from a loop in Python. Under ``vmap`` over workers each has its own kernel and
        XLA runs a grouped convolution, four times slower than ``shard_map`` over as
        many devices. :class:`PatchMixer` has neither trouble.
    """

    channels: tuple[int, int] = (16, 32)
    hidden: int = 32
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        first, second = self.channels
        x = nn.relu(nn.Conv(first, (5, 5), strides=(2, 2))(x))
        x = nn.relu(nn.Conv(second, (3, 3), strides=(2, 2))(x))
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(len(x), -1)))
        return _head(self.classes)(x)


def _patches(x: jax.Array, size: int) -> jax.Array:
    """``[n, h, w, c] -> [n, h w / size^2, size^2 c]``, cut row by row."""
    n, height, width, channels = x.shape
    if height % size or width % size:
        raise ValueError(
            f"images of {height} x {width} do not fall into patches of {size} x "
            f"{size}: choose a patch that divides both sides"
        )
    x = x.reshape(n, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, size * size * channels)
