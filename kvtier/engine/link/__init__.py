"""One secondary tier as the engine sees it: the actors of its link."""
