"""Methods that send signs, and a few bits of Adam's moments."""

from __future__ import annotations

from ..contracts import Method

METHODS: dict[str, Method] = {}
