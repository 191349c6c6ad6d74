"""Methods that send sums of hashed entries."""

from __future__ import annotations

from ..contracts import Method

METHODS: dict[str, Method] = {}
