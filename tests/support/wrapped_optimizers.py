"""Wrappers around optimizers, as libraries implement them."""

import torch


class Gradients:
    """Accelerate's GradientState, as far as its optimizer looks at it."""

    def __init__(self, num_steps=1):
        self.sync_gradients, self.num_steps = True, num_steps


class Delegating(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an Optimizer by class, which never calls Optimizer.__init__."""

    def __init__(self, optimizer, scaler=None, gradient_state=None):
        self.optimizer, self.scaler, self.gradient_state = optimizer, scaler, gradient_state or Gradients()

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=True):
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure=None):
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Lookahead(torch.optim.Optimizer):
    """As usual implementations: without Optimizer.__init__, with slow weights of its own in `state`."""

    def __init__(self, optimizer, every=2):
        self.optimizer, self.every, self.count = optimizer, every, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            with torch.no_grad():
                for parameter, slow in self.state.items():
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"fast": self.optimizer.state_dict(), "slow": list(self.state.values()), "count": self.count}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["fast"])
        self.param_groups = self.optimizer.param_groups
        self.state = dict(zip(self.state, state_dict["slow"], strict=True))
        self.count = state_dict["count"]


class Several:
    """No Optimizer at all: one that steps several."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        return {"each": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["each"], strict=True):
            optimizer.load_state_dict(state)


class ByHand:
    """SGD with momentum that knows nothing of torch.optim."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.moments = [torch.zeros_like(p) for p in self.parameters]

    def step(self):
        with torch.no_grad():
            for parameter, moment in zip(self.parameters, self.moments, strict=True):
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(moment, alpha=0.1)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self):
        return {"moments": self.moments}

    def load_state_dict(self, state_dict):
        self.moments = state_dict["moments"]


class Flat(torch.optim.Optimizer):
    """As torchtitan's container of optimizers: with hooks, and a state_dict of another shape."""

    def __init__(self, optimizer):
        self.inner = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return {f"optim.{key}": value for key, value in self.inner.state_dict().items()}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict({key.removeprefix("optim."): value for key, value in state_dict.items()})
