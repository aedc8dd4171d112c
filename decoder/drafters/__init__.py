"""Drafters: cheap proposers of tokens behind one interface (`base.Drafter`)."""

from decoder.drafters.base import Draft, Drafter, DraftState
from decoder.drafters.model import ModelDrafter
from decoder.drafters.ngram import NgramDrafter

__all__ = ["Draft", "DraftState", "Drafter", "ModelDrafter", "NgramDrafter"]
