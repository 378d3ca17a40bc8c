"""Do typed queries find their own domain in the text demo's run?"""
