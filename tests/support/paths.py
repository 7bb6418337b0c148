"""The folders of the project, for tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
STRUCTURES = TESTS / "structures"
GOLDEN = TESTS / "golden"
