"""Drafters: cheap proposers of tokens behind one interface (`base.Drafter`)."""

from decoder.drafters.base import BatchDrafter, Draft, Drafter, DraftState, RowDrafts, rows_of
from decoder.drafters.model import ModelDrafter
from decoder.drafters.ngram import NgramDrafter

__all__ = [
    "BatchDrafter",
    "Draft",
    "DraftState",
    "Drafter",
    "ModelDrafter",
    "NgramDrafter",
    "RowDrafts",
    "rows_of",
]
