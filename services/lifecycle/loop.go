package lifecycle

import (
	"context"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/scheduler"
)

// Run acts until ctx ends: it plans when something changed, and serves the links of hosts. It returns nil when ctx ended, after all
// that it started has ended.
func (l *Lifecycle) Run(ctx context.Context) error {
	if err := l.recall(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { l.serveLinks(ctx) })
	l.planLoop(ctx)
	return nil
}

// recall takes up when hosts were last heard of, from before the restart.
func (l *Lifecycle) recall(ctx context.Context) error {
	hosts, err := l.reader.Hosts(ctx)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range hosts {
		if l.heard[h.ID].Before(h.LastSeen) {
			l.heard[h.ID] = h.LastSeen
		}
	}
	return nil
}

// planLoop plans at once, at every wake and at every tick. Wakes that come while it plans are one.
func (l *Lifecycle) planLoop(ctx context.Context) {
	tick := time.NewTicker(l.set.Tick)
	defer tick.Stop()
	for pause := time.Duration(0); ; {
		again, err := l.plan(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			l.log.Error("planning failed", "error", err)
			pause = l.backOff(pause)
		case again: // something else was quicker; look at what it left
			pause = l.backOff(pause)
		default:
			pause = 0
		}
		var retry <-chan time.Time
		if pause > 0 {
			retry = time.After(pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-tick.C:
		case <-retry:
		}
	}
}

// backOff returns the pause after this one.
func (l *Lifecycle) backOff(pause time.Duration) time.Duration {
	if pause == 0 {
		return l.set.RetryMin
	}
	return min(2*pause, l.set.RetryMax)
}

// plan is one round: snapshot, plan, commit, dispatch, tell. again reports that placements no longer held when they were committed.
func (l *Lifecycle) plan(ctx context.Context) (again bool, err error) {
	snapshot, err := l.store.Snapshot(ctx, l.takesOrders)
	if err != nil {
		return false, err
	}
	l.nameSilence(snapshot)
	now := l.now()
	plan := scheduler.Plan(snapshot, l.set.Scheduler, now)
	var done fleet.Committed
	if len(plan.Placements)+len(plan.Reservations)+len(snapshot.Reservations) > 0 {
		if done, err = l.store.Commit(ctx, plan, now); err != nil {
			return false, err
		}
	}
	told := l.keep(snapshot, plan, now)
	l.dispatch(done.Hosts...)
	l.changed(ctx, done.Changed...)
	l.changed(ctx, told...)
	for _, p := range done.Placed {
		l.log.Info("workspace placed", "workspace", p.Run.Workspace, "epoch", p.Run.Epoch, "host", p.Host, "devices", p.Devices)
	}
	if len(done.Placed) > 0 {
		l.events.DevicesChanged()
	}
	return len(done.Dropped) > 0, l.refuse(ctx, plan.Refusals)
}

// refuse takes runs out of the queue that can never start as things are: their workspaces fail with the cause.
func (l *Lifecycle) refuse(ctx context.Context, refusals []fleet.Refusal) error {
	for _, r := range refusals {
		l.log.Info("workspace cannot start", "workspace", r.Run.Workspace, "epoch", r.Run.Epoch, "reason", r.Err)
		order := fleet.StopOrder{
			Workspace: r.Run.Workspace, Goal: fleet.GoalStopped, Refused: r.Run.Epoch,
			Reason: fleet.Reason{Code: ReasonCannotStart, Message: "it cannot start as things are: " + fleet.UserMessage(r.Err)},
		}
		if _, err := l.end(ctx, order); err != nil {
			return err
		}
	}
	return nil
}

// nameSilence says since when the hosts do not answer that do not.
func (l *Lifecycle) nameSilence(s fleet.Snapshot) {
	for i := range s.Hosts {
		h := &s.Hosts[i]
		if h.Usable || h.Why == "fenced" {
			continue
		}
		if since := l.UnreachableSince(h.ID); !since.IsZero() {
			h.Why = "does not answer since " + since.UTC().Format("2006-01-02 15:04:05 UTC")
		} else if l.Trouble(h.ID) != "" {
			h.Why = "takes no orders of this gateway; `carrel host ls` says why"
		}
	}
}

// keep remembers the plan's waits for views and its snapshot for admissions, and returns the workspaces whose wait changed.
func (l *Lifecycle) keep(snapshot fleet.Snapshot, plan fleet.Plan, now time.Time) []fleet.WorkspaceID {
	next := make(map[fleet.WorkspaceID]fleet.Wait, len(plan.Waits))
	l.mu.Lock()
	defer l.mu.Unlock()
	var told []fleet.WorkspaceID
	for _, w := range plan.Waits {
		next[w.Run.Workspace] = w
		if l.waits[w.Run.Workspace] != w {
			told = append(told, w.Run.Workspace)
		}
	}
	l.waits, l.reservations = next, plan.Reservations
	l.seen, l.seenAt = snapshot, now
	return told
}

// dispatch makes hosts get their desired state.
func (l *Lifecycle) dispatch(hosts ...fleet.HostID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range hosts {
		if link := l.links[id]; link != nil {
			poke(link.apply)
		}
	}
}

// after does what follows a committed change: hosts, plan, watchers.
func (l *Lifecycle) after(ctx context.Context, c fleet.Changes) {
	l.dispatch(c.Hosts...)
	if c.Freed {
		l.Replan()
		l.events.DevicesChanged()
	}
	l.changed(ctx, c.Workspaces...)
}
