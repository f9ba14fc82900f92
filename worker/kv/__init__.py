"""Where sequences keep their keys and values: stores behind one interface."""
