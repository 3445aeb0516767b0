package host

import (
	"context"
	"slices"
	"time"
)

// Unmanaged is a container with a label or a name of ours that no one asks for.
type Unmanaged struct {
	Name    string
	Key     Key      // zero unless the labels' signature holds
	Devices []string // from the same labels: never given to another
	Running bool
}

// eventLoop listens to the engine. Events only say where to look: after each connection, and every so often, everything is
// compared anyway, so that none is missed for long.
func (h *Host) eventLoop(ctx context.Context) {
	wait := h.opts.Times.Retry
	for ctx.Err() == nil {
		since := h.clock.Now().Wall.Add(-time.Second)
		begin := time.Now()
		err := h.runtime.Events(ctx, since, func() {
			h.compare(ctx)
			wake(h.probeWake)
		}, func(e Event) { h.event(e) })
		if ctx.Err() != nil {
			return
		}
		h.log.Debug("the engine's events ended; listening again", "error", err)
		if time.Since(begin) > h.opts.Times.RetryMost {
			wait = h.opts.Times.Retry
			h.compare(ctx) // finds out at once whether the engine is there
		}
		select {
		case <-ctx.Done():
		case <-h.after(wait):
		}
		wait = min(wait*2, h.opts.Times.RetryMost)
	}
}

// event notes what an inspection a moment later could no longer tell, and wakes the run.
func (h *Host) event(e Event) {
	rs := h.journal.Records(func(r *Record) bool { return r.ContainerID == e.ID && r.Phase != PhaseGone })
	if len(rs) == 0 {
		return
	}
	k := rs[0].Key
	now := h.clock.Now()
	at := now.at(e.At).clamp(Moment{}, now)
	switch e.Kind {
	case EventDie:
		if rs[0].Ended.IsZero() && !rs[0].Started.IsZero() && e.At.After(rs[0].EngineStarted) {
			h.journal.Change(k, func(r *Record) {
				code := e.ExitCode
				r.end(at.clamp(r.Started, now), true, &code)
			})
			if err := h.journal.Commit(); err != nil {
				h.log.Warn("the end of a container is not on disk yet", "run", k.String(), "error", err)
			}
		}
	case EventOOM:
		h.journal.Change(k, func(r *Record) {
			if r.Reason.Code == "" {
				r.Reason = Reason{ReasonMemoryInside, "a program inside was ended by the kernel because the workspace reached its memory limit"}
			}
		})
	case EventDestroy, EventOther:
	}
	h.mu.Lock()
	w := h.workers[k]
	h.mu.Unlock()
	if w == nil {
		return
	}
	if e.Kind == EventDie || e.Kind == EventDestroy {
		w.cut()
	}
	w.wakeUp()
}

// listLoop compares everything every so often.
func (h *Host) listLoop(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-h.after(h.opts.Times.List):
		}
		h.compare(ctx)
	}
}

// compare lists all containers once and has each run look at its own: only that tells one start of a container from another.
func (h *Host) compare(ctx context.Context) {
	containers, err := h.runtime.List(ctx)
	if h.heard(err) != nil {
		return
	}
	byID := make(map[string]Container, len(containers))
	for _, c := range containers {
		byID[c.ID] = c
	}
	for _, r := range h.journal.Records((*Record).live) {
		c, there := byID[r.ContainerID]
		h.wakeRun(r.Key, r.running() && (!there || !c.State.Running()))
	}
	h.unmanaged(ctx, containers)
}

func (h *Host) wakeRun(k Key, cut bool) {
	h.mu.Lock()
	w := h.workers[k]
	h.mu.Unlock()
	switch {
	case w == nil:
	case cut:
		w.cut()
	default:
		w.wakeUp()
	}
}

// unmanaged finds the containers of ours, or that say so, that no one asks for. They are shown and left alone; only what
// never ran is removed, once it is clear that nobody is about to start it.
func (h *Host) unmanaged(ctx context.Context, containers []Container) {
	found := map[string]Unmanaged{}
	var leftovers []string
	for _, c := range containers {
		if !claimsOurs(c) {
			continue
		}
		u := Unmanaged{Name: c.Name, Running: c.State.Running()}
		if verified, signed := h.opts.Signer.Verify(c.Labels); signed {
			u.Key, u.Devices = verified.Key, verified.Devices
			managed, leftover := h.standing(c, u.Key)
			if managed {
				continue
			}
			if leftover {
				leftovers = append(leftovers, c.ID)
				continue
			}
		}
		found[c.ID] = u
	}
	h.showStrangers(found)
	for _, id := range leftovers {
		if err := h.heard(h.runtime.Remove(ctx, id)); err != nil {
			h.log.Warn("a container that never ran could not be removed", "id", id, "error", err)
		}
	}
}

// standing says whether a worker sees to a signed container, or whether it was made and never started, and is nobody's now.
func (h *Host) standing(c Container, k Key) (managed, leftover bool) {
	r, known := h.journal.Record(k)
	d, _ := h.desiredOf(k)
	alive := !known || r.Phase != PhaseGone
	switch {
	case d != nil && alive && (r.ContainerID == c.ID || r.ContainerID == ""):
		return true, false
	case known && alive && r.ContainerID == c.ID && !h.known():
		return true, false // adopted; the gateway has not spoken yet
	}
	return false, c.State == StateCreated && h.known() && (!known || !alive)
}

func (h *Host) showStrangers(found map[string]Unmanaged) {
	h.mu.Lock()
	old := h.strangers
	h.strangers = found
	h.mu.Unlock()
	for id, u := range found {
		if _, shown := old[id]; !shown {
			h.log.Warn("a container that no one asks for", "name", u.Name, "signed", u.Key.valid(), "running", u.Running)
		}
	}
	if !slices.EqualFunc(sortedUnmanaged(old), sortedUnmanaged(found), equalUnmanaged) {
		wake(h.factsWake)
	}
}

// heartbeatLoop notes on disk until when containers were seen to run: the end of one that vanishes while the agent is down.
func (h *Host) heartbeatLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.after(h.opts.Times.Heartbeat):
		}
		if len(h.journal.Records((*Record).running)) == 0 {
			continue
		}
		h.compare(ctx)
		select { // the runs look at their containers meanwhile
		case <-ctx.Done():
			return
		case <-h.after(h.opts.Times.Retry):
		}
		if err := h.journal.Commit(); err != nil {
			h.log.Warn("the journal cannot be written", "error", err)
		}
	}
}

// deviceHeld says why a run's devices may still be in use: processes on them that are its own, or that nobody can name.
func (h *Host) deviceHeld(ctx context.Context, r Record) string {
	real := map[string]bool{}
	for _, g := range r.Devices {
		if !g.Simulated {
			real[g.ID] = true
		}
	}
	if len(real) == 0 {
		return ""
	}
	return h.gpuHeld(ctx, r.Key, real)
}
