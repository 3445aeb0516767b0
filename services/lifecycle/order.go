package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// live returns a workspace that is not deleted.
func (l *Lifecycle) live(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error) {
	w, err := l.store.Workspace(ctx, id)
	if err != nil {
		return w, err
	}
	if w.State == fleet.StateDeleted || w.Goal == fleet.GoalDeleted {
		return w, fleet.Errorf(fleet.KindNotFound, "workspace %s is deleted", w.Name)
	}
	return w, nil
}

// StartOrder asks for a run of a workspace.
type StartOrder struct {
	Workspace fleet.WorkspaceID
	By        fleet.User
	RequestID string // a retry with the same one does nothing and gets the workspace as it is
}

// Start queues a new run of a stopped or failed workspace. One that runs, or is on its way, is returned as it is; one that is stopping
// starts again once it is gone. KindExhausted: limit, or more than any host has.
func (l *Lifecycle) Start(ctx context.Context, o StartOrder) (fleet.Workspace, error) {
	order, w, done, err := l.named(ctx, o.By, o.RequestID, "start "+string(o.Workspace))
	if err != nil || done {
		return w, err
	}
	if w, err = l.live(ctx, o.Workspace); err != nil {
		return w, err
	}
	return l.start(ctx, w, order)
}

// named gives an order its name and finds out whether it was carried out before; w is then its workspace as it is now.
func (l *Lifecycle) named(ctx context.Context, by fleet.User, requestID, content string) (order fleet.OrderID, w fleet.Workspace, done bool, err error) {
	if err := checkRequestID(requestID); err != nil || requestID == "" {
		return order, w, false, err
	}
	order = fleet.OrderID{Actor: by.ID, ID: requestID, Fingerprint: content}
	w, done, err = l.store.Ordered(ctx, order, l.now())
	return order, w, done, err
}

func (l *Lifecycle) start(ctx context.Context, w fleet.Workspace, order fleet.OrderID) (fleet.Workspace, error) {
	before := w.Epoch
	switch on := w.State.Live() && w.Goal == fleet.GoalRunning; {
	case on && order.ID == "":
		return w, nil
	case !on:
		if err := l.mayStart(ctx, &w); err != nil {
			return w, err
		}
	}
	w, err := l.store.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID, Order: order}, l.now())
	if err != nil {
		return w, err
	}
	if w.Epoch > before {
		l.log.Info("workspace queued", "workspace", w.ID, "epoch", w.Epoch)
	}
	l.Replan()
	l.changed(ctx, w.ID)
	return w, nil
}

// Stop ends the run of a workspace; volumes are kept. by is the name of the one who asked. A grace of 0 is the deployment's. Idempotent.
func (l *Lifecycle) Stop(ctx context.Context, id fleet.WorkspaceID, by string, grace time.Duration) (fleet.Workspace, error) {
	if grace < 0 || grace > time.Hour {
		return fleet.Workspace{}, fleet.Errorf(fleet.KindInvalid, "a grace of %v cannot be asked for; choose up to 1h", grace)
	}
	w, err := l.live(ctx, id)
	if err != nil {
		return w, err
	}
	if !w.State.Live() {
		return w, nil
	}
	return l.end(ctx, fleet.StopOrder{
		Workspace: id, Goal: fleet.GoalStopped, Grace: cmp.Or(grace, l.set.StopGrace),
		Reason: fleet.Reason{Code: ReasonStoppedByUser, Message: "stopped by " + by},
	})
}

// Delete ends the run of a workspace and removes it once that is gone; with dropHome its home volume goes too, restorable for 7 days.
// Idempotent.
func (l *Lifecycle) Delete(ctx context.Context, id fleet.WorkspaceID, by string, dropHome bool) (fleet.Workspace, error) {
	w, err := l.store.Workspace(ctx, id)
	if err != nil || w.State == fleet.StateDeleted {
		return w, err
	}
	return l.end(ctx, fleet.StopOrder{
		Workspace: id, Goal: fleet.GoalDeleted, DropHome: dropHome, Grace: l.set.StopGrace,
		Reason: fleet.Reason{Code: ReasonDeletedByUser, Message: "deleted by " + by},
	})
}

// RestartOrder asks for another run in the place of the present one.
type RestartOrder struct {
	Workspace   fleet.WorkspaceID
	By          fleet.User
	UpdateImage bool   // look its image reference up again
	RequestID   string // a retry with the same one does nothing and gets the workspace as it is
}

// Restart ends the run of a workspace and starts another, which keeps its devices when they are still what it asks for. A stopped one is
// started, one that waits goes on waiting.
func (l *Lifecycle) Restart(ctx context.Context, o RestartOrder) (fleet.Workspace, error) {
	order, w, done, err := l.named(ctx, o.By, o.RequestID, fmt.Sprintf("restart %s %t", o.Workspace, o.UpdateImage))
	if err != nil || done {
		return w, err
	}
	if w, err = l.live(ctx, o.Workspace); err != nil {
		return w, err
	}
	if o.UpdateImage {
		if w, err = l.Update(ctx, UpdateOrder{Workspace: w.ID, Fields: []string{fieldImage}, Spec: w.Pending}); err != nil {
			return w, err
		}
	}
	if !w.State.Placed() || w.Goal != fleet.GoalRunning {
		return l.start(ctx, w, order)
	}
	if len(Pending(&w)) > 0 {
		if err := l.mayStart(ctx, &w); err != nil {
			return w, err
		}
	}
	spec := w.Pending
	return l.end(ctx, fleet.StopOrder{
		Workspace: w.ID, Goal: fleet.GoalRunning, Restart: true, Spec: &spec, Grace: l.set.StopGrace, Order: order,
		Reason: fleet.Reason{Code: ReasonRestartedByUser, Message: "restarted by " + o.By.Name},
	})
}

// end records a stop order and sees to what follows.
func (l *Lifecycle) end(ctx context.Context, order fleet.StopOrder) (fleet.Workspace, error) {
	w, changes, err := l.store.Stop(ctx, order, l.now())
	if err != nil {
		return w, err
	}
	if len(changes.Workspaces) > 0 {
		l.log.Info("workspace to end", "workspace", w.ID, "epoch", w.Epoch, "goal", w.Goal, "state", w.State, "reason", order.Reason.Code)
	}
	if !w.State.Live() {
		l.forget(w.ID)
	}
	l.after(ctx, changes)
	if !slices.Contains(changes.Workspaces, w.ID) {
		l.changed(ctx, w.ID)
	}
	l.remember(w)
	l.Replan()
	return w, nil
}

// UpdateOrder changes what the next run of a workspace gets.
type UpdateOrder struct {
	Workspace fleet.WorkspaceID
	Spec      fleet.Spec
	Fields    []string // of Spec: pool, image, gpu, cpu_millis, memory_mib, shm_mib, pids_limit, env, volumes
	IfVersion int64    // 0: whatever it is
}

// Update records what the next run gets; a run that goes on is not touched (see Pending). KindConflict when IfVersion is not the version.
func (l *Lifecycle) Update(ctx context.Context, o UpdateOrder) (fleet.Workspace, error) {
	w, err := l.live(ctx, o.Workspace)
	if err != nil {
		return w, err
	}
	spec, err := merge(w.Pending, o.Spec, o.Fields)
	if err != nil {
		return w, err
	}
	settled, origins, err := l.settle(ctx, spec, false)
	if err != nil {
		return w, err
	}
	w.Pending = settled
	check := l.couldStart // a stopped one may be changed while its owner's limit is used up
	if w.State.Live() {
		check = l.mayStart
	}
	if err := check(ctx, &w); err != nil {
		return w, err
	}
	merged := maps.Clone(w.Origins)
	if merged == nil {
		merged = map[string]string{}
	}
	for _, f := range o.Fields {
		delete(merged, f)
		if from := origins[f]; from != "" {
			merged[f] = from
		}
	}
	w, err = l.store.ChangeSpec(ctx, fleet.SpecChange{Workspace: o.Workspace, Spec: w.Pending, Origins: merged, IfVersion: o.IfVersion}, l.now())
	if err != nil {
		return w, err
	}
	l.Replan()
	l.changed(ctx, w.ID)
	return w, nil
}

// Fence ends the leases of a host that an admin knows to be dead, and returns how many there were. KindConflict while the host answers.
func (l *Lifecycle) Fence(ctx context.Context, host fleet.HostID, reason string) (int, error) {
	if l.Connected(host) {
		return 0, fleet.Errorf(fleet.KindConflict, "the host answers; stop its workspaces, or drain it, instead of declaring it dead")
	}
	ended, changes, err := l.store.Fence(ctx, host, reason, l.now())
	if err != nil {
		return 0, err
	}
	l.log.Warn("host fenced", "host", host, "leases_ended", ended, "reason", reason)
	l.after(ctx, changes)
	l.events.HostChanged(host)
	l.Replan()
	return ended, nil
}

// HostChanged tells that an admin changed a host or its devices (drained, excluded): the host is told, and a new plan is made.
func (l *Lifecycle) HostChanged(host fleet.HostID) {
	l.dispatch(host)
	l.events.HostChanged(host)
	l.events.DevicesChanged()
	l.Replan()
}

// KeysChanged tells that a user's device keys changed, so that the hosts of the user's runs let in the right ones.
func (l *Lifecycle) KeysChanged(_ context.Context, user fleet.UserID) error {
	l.mu.Lock()
	var hosts []fleet.HostID
	for host, users := range l.users {
		if users[user] {
			hosts = append(hosts, host)
		}
	}
	l.mu.Unlock()
	l.dispatch(hosts...)
	return nil
}
