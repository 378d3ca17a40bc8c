"""The truth by retraining. Knows nothing of stored rows, embeddings or estimates."""

from .tsloo import Removal, tsloo

__all__ = ["Removal", "tsloo"]
