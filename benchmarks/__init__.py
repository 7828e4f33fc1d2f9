"""What was measured with this package, how, and the pages that show it. README.md has a line per question."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
