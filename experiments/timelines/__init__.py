"""How right size timelines are: when influence was large, by a recording and exactly."""
