"""Models whose forward is C++: meta models without transformers, and their description for the compiled step."""
