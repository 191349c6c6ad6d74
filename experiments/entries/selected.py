"""Methods that send some entries of gradients or displacements."""

from __future__ import annotations

from ..contracts import Method

METHODS: dict[str, Method] = {}
