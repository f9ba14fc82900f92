"""The parts of `furrow bench fanout`: leaders without a model, clients that read raw bytes, and a bare stream."""
