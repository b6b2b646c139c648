"""Ranks whose messages go over the transport of examples/own_transport.py."""

import sys
from pathlib import Path

from tests.harness.gloo_ranks import GlooRanks

EXAMPLES = Path(__file__).parents[2] / "examples"
VARIABLE = "own_transport:PIPES"


def find_examples() -> None:
    """Lets this process import the programs of examples/."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))


def pipe_ranks(size: int, **environment: str) -> GlooRanks:
    """Processes connected by pipes."""
    return GlooRanks(size, {"TRITONDT_TRANSPORT": VARIABLE, **environment}, prepare=find_examples)
