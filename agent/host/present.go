package host

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// logTail is how many of the last lines are kept of a container that ended, and how much of each.
const (
	logTail     = 20
	logLineMost = 1000 // bytes
)

func isChanged(err error) bool { return errors.Is(err, errChanged) || errors.Is(err, context.Canceled) }

// present is a run with a container under its name or id.
func (w *worker) present(ctx context.Context, d *Desired, r Record, c Container) next {
	verified, signed := w.host.opts.Signer.Verify(c.Labels)
	ours := signed && verified.Key == w.key
	if !ours || c.ID != r.ContainerID {
		return w.other(ctx, d, r, c, ours)
	}
	switch {
	case c.State == StateCreated:
		return w.halfMade(ctx, d, r, c)
	case c.State == StateRemoving:
		return next{after: w.host.opts.Times.Wait}
	case c.State.Running():
		return w.runs(ctx, d, r, c)
	}
	return w.ended(ctx, d, r, c)
}

// other is a container that has the run's name and is not the one that the journal knows.
func (w *worker) other(ctx context.Context, d *Desired, r Record, c Container, ours bool) next {
	switch {
	case d == nil:
		return next{idle: true}
	case ours && r.ContainerID == "" && !c.State.Running():
		// Made by this agent before it could note that: nothing ran in it.
		return w.remove(ctx, c.ID)
	case ours || c.ID == r.ContainerID:
		w.passing(Reason{ReasonConflict, fmt.Sprintf("the container %s was not started by this agent as it remembers; an admin must look at it on the host (docker inspect %s) and remove it",
			c.Name, c.Name)})
		return next{after: w.host.opts.Times.RetryMost}
	case r.ContainerID != "":
		return w.absent(ctx, d, r) // ours is gone, somebody took its name
	case r.Doomed || d.Goal == GoalGone:
		return w.release(ctx, d)
	}
	return w.doom(Reason{ReasonNameTaken, fmt.Sprintf("a container that is not Carrel's has the name %s on this host; an admin must rename or remove it, then start again", c.Name)})
}

// halfMade is a container that was made and not started.
func (w *worker) halfMade(ctx context.Context, d *Desired, r Record, c Container) next {
	switch {
	case d == nil:
		return next{idle: true}
	case r.Doomed, d.Goal == GoalGone, w.created != c.ID, w.failures > 3:
		return w.remove(ctx, c.ID)
	}
	return w.launch(ctx, d, c.ID)
}

func (w *worker) remove(ctx context.Context, id string) next {
	if err := w.host.journal.Commit(); err != nil {
		return w.retry("write its journal", err)
	}
	if err := w.host.heard(w.host.runtime.Remove(ctx, id)); err != nil {
		return w.retry("remove the container", err)
	}
	w.created = ""
	return next{}
}

// runs is a container that runs.
func (w *worker) runs(ctx context.Context, d *Desired, r Record, c Container) next {
	h := w.host
	if r.Started.IsZero() {
		r = h.journal.Change(w.key, func(r *Record) {
			now := h.clock.Now()
			r.EngineStarted, r.Started, r.LastSeen = c.StartedAt, now.at(c.StartedAt).clamp(Moment{}, now), now
		})
		if err := h.journal.Commit(); err != nil {
			return w.retry("write its journal", err)
		}
	}
	if !r.EngineStarted.Equal(c.StartedAt) && !r.Doomed {
		return w.restarted(r, c)
	}
	if r.Ended.IsZero() {
		h.journal.Note(w.key, func(r *Record) { r.LastSeen = w.asked })
	}
	w.attach(c)
	switch {
	case d == nil:
		return next{idle: true}
	case r.Doomed || d.Goal == GoalGone || !r.Ended.IsZero():
		return w.stop(ctx, d, r, c)
	}
	return w.configure(ctx, d, r)
}

// restarted is a container that somebody else ended and started again: the run ended with the first.
func (w *worker) restarted(r Record, c Container) next {
	h := w.host
	h.journal.Change(w.key, func(r *Record) {
		now := h.clock.Now()
		if r.LastSeen.Boot != now.Boot {
			r.end(r.LastSeen, false, nil)
			r.explain(rebooted())
			return
		}
		code := c.ExitCode
		r.end(now.at(c.FinishedAt).clamp(r.LastSeen, now), !c.FinishedAt.IsZero(), &code)
	})
	return w.doom(Reason{ReasonRestarted, "the container was restarted by somebody else on the host, which ended what ran in it; start the workspace again"})
}

func (w *worker) attach(c Container) {
	if c.PID == 0 || w.attached == c.PID {
		return
	}
	if _, err := w.host.inside.Prepare(w.key); err != nil {
		w.host.log.Warn("no link to carrel-init", "run", w.key.String(), "error", err)
		return
	}
	if err := w.host.inside.Attach(w.key, c.PID); err != nil {
		w.host.log.Warn("no link to carrel-init", "run", w.key.String(), "error", err)
		return
	}
	w.attached = c.PID
}

// configure tells carrel-init what it must know; with its first answer the run is ready.
func (w *worker) configure(ctx context.Context, d *Desired, r Record) next {
	h := w.host
	_, version := h.desiredOf(w.key)
	if r.Phase == PhaseReady && w.configured == version {
		return next{idle: true}
	}
	limit := h.opts.Times.Ready
	waiting, done := w.waiting(ctx)
	defer done()
	if now, _ := h.desiredOf(w.key); now == nil || now.Goal != GoalRunning {
		return next{}
	}
	waiting, cancel := context.WithTimeout(waiting, limit)
	defer cancel()
	answer, err := h.inside.Configure(waiting, w.key, insideConfig(d))
	switch {
	case err == nil:
	case ctx.Err() != nil || isChanged(context.Cause(waiting)):
		return next{}
	case r.Ready.IsZero() && KindOf(err) == KindInvalid:
		return w.doom(Reason{ReasonRefused, err.Error()})
	case r.Ready.IsZero() && h.clock.Now().Sub(r.Started) >= limit:
		return w.doom(Reason{ReasonNotReady, fmt.Sprintf("carrel-init inside did not answer within %s: %v", limit, err)})
	default:
		return w.retry("reach carrel-init", err)
	}
	w.configured, w.failures = version, 0
	err = w.phase(PhaseReady, func(r *Record) {
		r.Sudo = answer.Sudo
		if r.Ready.IsZero() {
			r.Ready = h.clock.Now()
		}
	})
	if err != nil {
		return w.retry("write its journal", err)
	}
	return next{}
}

// stop ends a container that runs: first by telling carrel-init, which tells the open sessions, then by the engine.
func (w *worker) stop(ctx context.Context, d *Desired, r Record, c Container) next {
	h := w.host
	if r.Phase != PhaseStopping {
		if err := w.phase(PhaseStopping, nil); err != nil {
			// A full disk keeps no workspace alive that should end.
			h.log.Warn("a stop is not on disk", "run", w.key.String(), "error", err)
		}
		why := r.Reason.Message
		if d.Goal == GoalGone {
			why = stopped(d).Message
		}
		polite, cancel := context.WithTimeout(ctx, politeTime)
		if err := h.inside.Stop(polite, w.key, why, d.StopGrace); err != nil {
			h.log.Debug("carrel-init was not told of the stop", "run", w.key.String(), "error", err)
		}
		cancel()
	}
	if err := h.heard(h.runtime.Stop(ctx, c.ID, d.StopGrace)); err != nil && KindOf(err) != KindNotFound {
		return w.retry("stop the container", err)
	}
	w.failures = 0
	return next{}
}

// politeTime bounds the call that tells open sessions; carrel-init answers before it begins.
const politeTime = 3 * time.Second

// ended is a container that no longer runs: its end is noted, then it is removed.
func (w *worker) ended(ctx context.Context, d *Desired, r Record, c Container) next {
	h := w.host
	if r.Ended.IsZero() || r.ExitCode == nil && !r.Unattested || r.LogTail == nil {
		tail := w.tail(ctx, c.ID)
		h.journal.Change(w.key, func(r *Record) {
			if r.Phase != PhaseStopping {
				r.Phase = PhaseStopping
			}
			h.noteEnd(r, c)
			r.OutOfMemory = r.OutOfMemory || c.OutOfMemory
			if d != nil && d.Goal == GoalGone && !r.Doomed {
				r.explain(stopped(d))
			}
			r.explain(exitReason(r, c))
			r.LogTail = tail
		})
	}
	if d == nil {
		if err := h.journal.Commit(); err != nil {
			return w.retry("write its journal", err)
		}
		return next{idle: true}
	}
	return w.remove(ctx, c.ID)
}

// noteEnd takes the end that the engine reports, unless the engine cannot know it.
func (h *Host) noteEnd(r *Record, c Container) {
	now, code := h.clock.Now(), c.ExitCode
	if r.Started.IsZero() && !c.StartedAt.IsZero() {
		r.EngineStarted, r.Started = c.StartedAt, now.at(c.StartedAt).clamp(Moment{}, now)
	}
	finished := now.at(c.FinishedAt)
	if !r.LastSeen.IsZero() && r.LastSeen.Boot != now.Boot {
		// An engine that finds a container dead after a reboot writes the time of its finding.
		if c.FinishedAt.IsZero() || finished.Boot == now.Boot {
			r.end(r.LastSeen, false, nil)
		} else {
			r.end(finished.clamp(r.LastSeen, finished), true, &code)
		}
		r.explain(rebooted())
		return
	}
	if c.FinishedAt.IsZero() {
		r.end(r.LastSeen, false, &code)
		return
	}
	low := r.LastSeen
	if low.IsZero() {
		low = r.Started
	}
	r.end(finished.clamp(low, now), true, &code)
}

func exitReason(r *Record, c Container) Reason {
	switch {
	case c.OutOfMemory:
		return Reason{ReasonOutOfMemory, "it reached its memory limit, and the kernel ended its first process; start it again with more memory"}
	case c.StartError != "" && r.Ready.IsZero() && c.ExitCode >= 125:
		return Reason{ReasonStartFailed, "the container engine could not start it: " + c.StartError}
	case c.ExitCode == 128+int(syscall.SIGKILL) || c.ExitCode == 128+int(syscall.SIGTERM):
		return Reason{ReasonKilled, fmt.Sprintf("it was ended by signal %d from outside Carrel; start it again", c.ExitCode-128)}
	}
	return Reason{ReasonExited, fmt.Sprintf("its first process ended by itself with status %d", c.ExitCode)}
}

// tail returns the last lines that the container wrote; none is no error worth a retry.
func (w *worker) tail(ctx context.Context, id string) []string {
	lines := []string{}
	err := w.host.runtime.Logs(ctx, id, LogQuery{Tail: logTail}, func(_ time.Time, line string) error {
		if len(line) > logLineMost {
			line = line[:logLineMost] + " ..."
		}
		lines = append(lines, validUTF8(line))
		return nil
	})
	if err != nil {
		w.host.log.Warn("the last lines of a container cannot be read", "run", w.key.String(), "error", err)
	}
	if len(lines) > logTail {
		lines = lines[len(lines)-logTail:]
	}
	return lines
}
