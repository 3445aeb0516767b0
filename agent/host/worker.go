package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// worker makes one run what it should be, step by step. Each step looks at what is wanted and at what is there, does one
// thing, and leaves the rest to the next: so that it does not matter where the one before was cut off.
type worker struct {
	host *Host
	key  Key
	wake chan struct{}

	mu        sync.Mutex
	interrupt context.CancelCauseFunc // of the wait in progress that a change may cut short

	// The loop's own.
	asked      Moment // when the engine was last asked
	created    string // container that this worker made and has not seen started
	attached   int    // process that carrel-init's link was told of
	configured int64  // version that carrel-init confirmed
	failures   int    // in a row
	reported   time.Time
	heldWhy    string // why its devices were still held when last asked
}

// next says when to step again.
type next struct {
	after time.Duration // 0: at once
	idle  bool          // not before something changes
	done  bool          // never
}

var errChanged = errors.New("what is wanted or what is there has changed")

func newWorker(h *Host, k Key) *worker { return &worker{host: h, key: k, wake: make(chan struct{}, 1)} }

func (w *worker) wakeUp() { wake(w.wake) }

// desiredChanged wakes the worker and cuts a wait short whose purpose may be gone.
func (w *worker) desiredChanged() {
	d, _ := w.host.desiredOf(w.key)
	if d == nil || d.Goal == GoalGone {
		w.cut()
	}
	w.wakeUp()
}

// cut ends the wait in progress.
func (w *worker) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.interrupt != nil {
		w.interrupt(errChanged)
	}
	w.wakeUp()
}

// waiting returns a context that cut ends.
func (w *worker) waiting(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	w.mu.Lock()
	w.interrupt = cancel
	w.mu.Unlock()
	return ctx, func() {
		w.mu.Lock()
		w.interrupt = nil
		w.mu.Unlock()
		cancel(nil)
	}
}

func (w *worker) loop(ctx context.Context) {
	defer w.host.workerDone(w)
	for ctx.Err() == nil {
		n := w.step(ctx)
		switch {
		case n.done:
			return
		case n.idle:
			select {
			case <-ctx.Done():
			case <-w.wake:
			}
		case n.after > 0:
			select {
			case <-ctx.Done():
			case <-w.wake:
			case <-w.host.after(n.after):
			}
		}
	}
}

// retry is a wait that grows with each failure in a row.
func (w *worker) retry(act string, err error) next {
	if errors.Is(err, errChanged) {
		return next{}
	}
	w.failures++
	t := w.host.opts.Times
	wait := min(t.Retry<<min(w.failures-1, 16), t.RetryMost)
	if wait <= 0 {
		wait = t.RetryMost
	}
	w.host.log.Warn("a step failed; trying again", "run", w.key.String(), "act", act, "error", err, "in", wait)
	if w.failures >= 2 && KindOf(err) != KindUnavailable {
		w.passing(Reason{ReasonHostFault, fmt.Sprintf("this host cannot %s yet and tries again: %v", act, err)})
	}
	return next{after: wait}
}

// passing reports a state of affairs that may pass by itself.
func (w *worker) passing(reason Reason) {
	if r, ok := w.host.journal.Record(w.key); ok && r.Reason == reason {
		return
	}
	w.host.journal.Change(w.key, func(r *Record) {
		if r.Phase == "" {
			r.Phase = PhaseStarting
		}
		if r.Reason.Code == "" || r.Reason.passing() {
			r.Reason = reason
		}
	})
}

// step looks and acts once.
func (w *worker) step(ctx context.Context) next {
	h := w.host
	d, _ := h.desiredOf(w.key)
	r, known := h.journal.Record(w.key)
	if known && r.Phase == PhaseGone || !known && d == nil {
		return next{done: true}
	}
	name := r.ContainerID
	if name == "" {
		name = w.key.Container()
	}
	w.asked = h.clock.Now()
	c, err := h.runtime.Inspect(ctx, name)
	switch {
	case h.answered(err) == KindNotFound:
		return w.absent(ctx, d, r)
	case err != nil:
		return w.retry("look at the container", err)
	}
	return w.present(ctx, d, r, c)
}

// absent is a run without container.
func (w *worker) absent(ctx context.Context, d *Desired, r Record) next {
	h := w.host
	ending := r.Doomed || d != nil && d.Goal == GoalGone
	switch {
	case r.ContainerID != "" && r.Started.IsZero():
		// It was made and never seen to run: begin anew, or end.
		if d == nil {
			return next{idle: true}
		}
		if !ending {
			w.created = ""
			h.journal.Change(w.key, func(r *Record) { r.ContainerID = "" })
			return next{}
		}
	case r.ContainerID != "":
		w.vanished(d, r)
	case d == nil && !r.Doomed && !h.known():
		return next{idle: true} // nobody has said yet what is wanted
	case d == nil:
		// Nothing is there and nobody asks for it.
	case !ending:
		return w.start(ctx, d)
	}
	return w.release(ctx, d)
}

// vanished notes the end of a container that somebody else removed.
func (w *worker) vanished(d *Desired, r Record) {
	if !r.Ended.IsZero() && r.Reason.Code != "" && !r.Reason.passing() {
		return
	}
	h := w.host
	now := h.clock.Now()
	reason := Reason{ReasonRemoved, "the container was removed by somebody else on the host; start the workspace again, its volumes are kept"}
	switch {
	case r.LastSeen.Boot != now.Boot:
		reason = rebooted()
	case d != nil && d.Goal == GoalGone:
		reason = stopped(d)
	}
	h.log.Warn("a container is gone", "run", w.key.String(), "reason", reason.Code)
	h.journal.Change(w.key, func(r *Record) {
		r.end(r.LastSeen, false, nil)
		r.explain(reason)
	})
}

func rebooted() Reason {
	return Reason{ReasonRebooted, "the host was restarted; start the workspace again, its volumes are kept"}
}

// release reports a run as gone once nothing of it can hold a device.
func (w *worker) release(ctx context.Context, d *Desired) next {
	h := w.host
	r, _ := h.journal.Record(w.key)
	if r.ContainerID != "" {
		if why := h.deviceHeld(ctx, r); why != "" {
			if r.Phase != PhaseStopping {
				h.journal.Change(w.key, func(r *Record) { r.Phase = PhaseStopping })
			}
			if why != w.heldWhy {
				w.heldWhy = why
				h.log.Info("a device is still held", "run", w.key.String(), "why", why)
			}
			return next{after: h.opts.Times.Wait}
		}
	}
	if err := h.journal.Commit(); err != nil {
		return w.retry("write its journal", err)
	}
	h.journal.Change(w.key, func(r *Record) {
		r.Phase = PhaseGone
		if d != nil && d.Goal == GoalGone {
			r.explain(stopped(d))
		}
		r.explain(Reason{ReasonStopped, "stopped"})
	})
	h.inside.Forget(w.key)
	if err := h.journal.Commit(); err != nil {
		h.log.Warn("the end of a run is not on disk yet", "run", w.key.String(), "error", err)
	}
	h.give(w.key)
	h.log.Info("run gone", "run", w.key.String())
	return next{done: true}
}

func stopped(d *Desired) Reason {
	if d.Reason == "" {
		return Reason{ReasonStopped, "stopped"}
	}
	return Reason{ReasonStopped, d.Reason}
}

// doom ends a run for a reason of the host's.
func (w *worker) doom(reason Reason) next {
	w.host.log.Warn("a run cannot go on", "run", w.key.String(), "code", reason.Code, "message", reason.Message)
	w.host.journal.Change(w.key, func(r *Record) {
		r.explain(reason)
		r.Doomed = true
		if r.Phase == "" {
			r.Phase = PhaseStarting
		}
	})
	return next{}
}

// phase moves a run on, on disk.
func (w *worker) phase(p Phase, change func(*Record)) error {
	r := w.host.journal.Change(w.key, func(r *Record) {
		if r.Phase != p {
			r.Phase = p
			if r.Reason.passing() {
				r.Reason = Reason{}
			}
		}
		if change != nil {
			change(r)
		}
	})
	w.host.log.Info("run", "run", w.key.String(), "phase", string(r.Phase))
	return w.host.journal.Commit()
}
