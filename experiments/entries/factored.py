"""Methods that send matrices as products of narrow ones."""

from __future__ import annotations

from ..contracts import Method

METHODS: dict[str, Method] = {}
