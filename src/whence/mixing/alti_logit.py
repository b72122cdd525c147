def alti_logit(trace): raise NotImplementedError
