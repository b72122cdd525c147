def decompx(trace): raise NotImplementedError
