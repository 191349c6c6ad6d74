"""Build notebooks from their sources: run every cell, keep only what a reader sees.

    python notebooks/build.py                      # all of them, beside their sources
    python notebooks/build.py notebooks/01_tour.py --into built

The source is a script in jupytext's percent format. What would differ at the next
build for no reason (times, random names of cells, versions) is left out. A notebook
runs in an empty folder, so that it depends on no file, and is replaced whole.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def build(source: Path, into: Path) -> Path:
    """Run the notebook of a source and write it; its place. A cell's error is raised."""
    notebook = jupytext.read(source)
    run(notebook)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.id = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        cell.metadata = {}
    nbformat.validate(notebook)
    into.mkdir(parents=True, exist_ok=True)
    place = into / f"{source.stem}.ipynb"
    with tempfile.TemporaryDirectory(dir=into) as beside:
        nbformat.write(notebook, whole := Path(beside) / place.name)
        whole.replace(place)
    return place


def run(notebook: nbformat.NotebookNode) -> None:
    """Fill in the outputs of all cells, from a new kernel in an empty folder."""
    sealed = Config()
    sealed.KernelManager.transport_encryption = "auto"  # where the kernel knows how
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as empty:
        # Neither anyone's settings nor their history.
        os.environ.update(IPYTHONDIR=own, JUPYTER_RUNTIME_DIR=own)
        NotebookClient(
            notebook,
            config=sealed,
            kernel_name=KERNEL["name"],
            resources={"metadata": {"path": empty}},
            timeout=None,
            coalesce_streams=True,  # else they break where the clock says
            record_timing=False,
        ).execute()


def main() -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description="Run notebooks from their sources.")
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--into", type=Path, help="a folder; that of the source")
    given = parser.parse_args()
    for source in given.sources or sorted(FOLDER.glob("[0-9]*.py")):
        print(build(source, given.into or source.parent))


if __name__ == "__main__":
    main()
