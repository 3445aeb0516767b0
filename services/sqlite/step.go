package sqlite

import (
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// step carries out what was decided about a run record.
func (o *observing) step(w *fleet.Workspace, run *fleet.Run, r *fleet.ObservedRun, step fleet.Step) error {
	recorded, err := o.record(run, &step)
	if err != nil {
		return err
	}
	if step.Release {
		ended := step.EndedAt
		if ended.IsZero() {
			ended = step.Run.EndedAt
		}
		if err := o.release(r, ended); err != nil {
			return err
		}
	}
	before := *w
	if !o.move(w, &step) {
		return nil
	}
	switch {
	case step.Delete:
		if err := o.t.deleteWorkspace(w); err != nil {
			return err
		}
	case step.Requeue:
		if err := o.requeue(w, run, &step); err != nil {
			return err
		}
	}
	if !recorded && jsonArg(before) == jsonArg(*w) {
		return nil
	}
	o.changes.Workspaces = append(o.changes.Workspaces, w.ID)
	return o.t.storeWorkspace(&before, w)
}

// move takes the step's state, reason and sudo; false when the table of a workspace's life does not allow the step, which is then a
// fault of ours: what is there stays.
func (o *observing) move(w *fleet.Workspace, step *fleet.Step) bool {
	if step.State != "" && !w.State.CanBecome(step.State) {
		o.t.db.log.Error("a step that the table of states does not have was ignored", "workspace", w.ID, "from", w.State, "to", step.State)
		return false
	}
	if step.State != "" {
		w.State = step.State
	}
	if step.Reason.Code != "" {
		w.Reason = step.Reason
	}
	if step.Sudo != "" {
		w.Sudo = step.Sudo
	}
	if w.State == fleet.StateStopped || w.State == fleet.StateFailed {
		w.Restart = false
	}
	return true
}

// record notes times, container and image of a run where they are new; true when something was. What was noted once stays, and a time
// lies between the placement and now.
func (o *observing) record(run *fleet.Run, step *fleet.Step) (bool, error) {
	within := func(have, seen time.Time) any {
		if !have.IsZero() || seen.IsZero() {
			return timeArg(have)
		}
		return min(max(millis(seen), millis(run.PlacedAt)), o.t.now)
	}
	started, ready, ended := within(run.StartedAt, step.Run.StartedAt), within(run.ReadyAt, step.Run.ReadyAt), within(run.EndedAt, step.Run.EndedAt)
	container, digest, reason := run.ContainerID, run.ImageDigest, run.Reason
	if step.Run.ContainerID != "" {
		container = step.Run.ContainerID
	}
	if step.Run.ImageDigest != "" {
		digest = step.Run.ImageDigest
	}
	if step.Run.Reason.Code != "" {
		reason = step.Run.Reason
	}
	same := started == timeArg(run.StartedAt) && ready == timeArg(run.ReadyAt) && ended == timeArg(run.EndedAt) &&
		container == run.ContainerID && digest == run.ImageDigest && jsonArg(reason) == jsonArg(run.Reason)
	if same {
		return false, nil
	}
	return true, o.t.exec(`UPDATE run SET started_at = ?, ready_at = ?, ended_at = ?, ended_unattested = max(ended_unattested, ?), container_id = ?, image_digest = ?, reason = ?
		WHERE workspace = ? AND epoch = ?`, started, ready, ended, step.Run.EndedUnattested, container, digest, jsonArg(reason), run.Key.Workspace, run.Key.Epoch)
}

// requeue makes a new run of a workspace whose run is gone. With Keep its host and devices pass over here, before anyone else's turn, when
// they still fit; else it waits like others. What its owner has to put right makes it fail with that reason.
func (o *observing) requeue(w *fleet.Workspace, run *fleet.Run, step *fleet.Step) error {
	submitted := o.t.now
	if run.StartedAt.IsZero() && step.Run.StartedAt.IsZero() && !step.Keep {
		submitted = min(millis(run.QueuedAt), submitted) // it never ran: its turn stays
	}
	saved := *w
	err := o.t.attempt(func() error { return o.t.queueRun(w, submitted, refuseMissing) })
	if err != nil && fleet.KindOf(err) != fleet.KindInternal {
		*w = saved
		w.State, w.Goal, w.Restart = fleet.StateFailed, fleet.GoalStopped, false
		w.Reason = fleet.Reason{Code: "volume_missing", Message: fleet.UserMessage(err)}
		return nil
	}
	if err != nil || !step.Keep {
		return err
	}
	return o.keep(w, run)
}

// keep places a new run where the one before was, if the new wish can be met there.
func (o *observing) keep(w *fleet.Workspace, old *fleet.Run) error {
	p := fleet.Placement{
		Run: fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch}, Host: old.Host, Devices: old.Devices,
		CPUMillis: old.CPUMillis, MemoryMiB: old.MemoryMiB, ShmMiB: old.ShmMiB, PidsLimit: old.PidsLimit,
	}
	for _, size := range []struct {
		granted *int64
		asked   int64
	}{{&p.CPUMillis, w.Spec.CPUMillis}, {&p.MemoryMiB, w.Spec.MemoryMiB}, {&p.ShmMiB, w.Spec.ShmMiB}, {&p.PidsLimit, w.Spec.PidsLimit}} {
		if size.asked > 0 {
			*size.granted = size.asked
		}
	}
	c := &committing{t: o.t, hosts: map[fleet.HostID]*hostRoom{}, held: map[fleet.UserID]int{}}
	err := o.t.attempt(func() error {
		h, err := c.room(p.Host)
		if err != nil {
			return err
		}
		h.host.Draining = false // a restart stays where it is
		if err := c.checkHost(h, w, &p); err != nil {
			return err
		}
		if err := c.checkDevices(h, w, &p); err != nil {
			return err
		}
		volumes, err := o.t.checkMounts(p.Run, p.Host)
		if err != nil {
			return err
		}
		return o.t.carryOut(w, h.host.Pool, &p, volumes)
	})
	switch {
	case err == nil:
		w.State = fleet.StatePulling
		o.touched = append(o.touched, p.Host)
		return nil
	case fleet.KindOf(err) != fleet.KindInternal:
		o.t.db.log.Info("a restart could not keep its place and waits in the queue", "workspace", w.ID, "reason", fleet.UserMessage(err))
		return nil
	}
	return err
}
