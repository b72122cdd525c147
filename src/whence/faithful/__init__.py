"""Which explanation is faithful, which is determined by the computation, and which would a person mark the same way?"""
