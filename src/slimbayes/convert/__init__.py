"""From a plain model to a converted one and back: the plan, the swap, the summary, the files on disk."""
