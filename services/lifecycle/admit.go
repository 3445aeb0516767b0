package lifecycle

import (
	"context"
	"fmt"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/scheduler"
)

// admission is a workspace that its owner wants to start.
type admission struct {
	owner     fleet.User
	workspace *fleet.Workspace // Pending is what it would get; names of models are put right in it
	own       []fleet.Workspace
	freshHome bool
}

// admit refuses what can never start as things are, and what the owner's limit does not allow now (CLI-11, SCHED-09). What merely has
// to wait is admitted. Two orders at the same moment may both be admitted; the plan's commit lets only one of them start.
func (l *Lifecycle) admit(ctx context.Context, a admission) error {
	var refused error
	for _, fresh := range []bool{false, true} { // the last plan's picture says yes to nearly all; only a fresh one says no
		snapshot, err := l.picture(ctx, fresh)
		if err != nil {
			return err
		}
		matchModels(&a.workspace.Pending, snapshot)
		r, _, err := l.request(ctx, *a.workspace, a.owner, a.freshHome)
		if err != nil {
			return err
		}
		if refused = scheduler.Feasible(snapshot, r, l.set.Scheduler); refused == nil {
			return withinLimit(r, a)
		}
	}
	return refused
}

// picture returns a snapshot of hosts: that of the last plan when it is not old, or a fresh one.
func (l *Lifecycle) picture(ctx context.Context, fresh bool) (fleet.Snapshot, error) {
	now := l.now()
	l.mu.Lock()
	seen, at := l.seen, l.seenAt
	l.mu.Unlock()
	if !fresh && !at.IsZero() && now.Sub(at) < 2*l.set.Tick {
		return seen, nil
	}
	return l.store.Snapshot(ctx, l.Connected)
}

// withinLimit counts what the owner's other workspaces hold or wait for; those on their way to stopping do not count.
func withinLimit(r fleet.Request, a admission) error {
	count := r.Spec.GPU.Count
	if count == 0 || r.GPULimit < 0 {
		return nil
	}
	used := 0
	var parts []string
	for _, w := range a.own {
		if w.ID == a.workspace.ID || w.Goal != fleet.GoalRunning || !w.State.Live() || w.Spec.GPU.Count == 0 {
			continue
		}
		used += w.Spec.GPU.Count
		parts = append(parts, fmt.Sprintf("%s (%d)", w.Name, w.Spec.GPU.Count))
	}
	if used+count <= r.GPULimit {
		return nil
	}
	return fleet.Errorf(fleet.KindExhausted, "your limit is %d GPUs at once, %d are taken by %s, and this one needs %d; stop one, ask for fewer, or an admin to raise the limit",
		r.GPULimit, used, strings.Join(parts, ", "), count)
}

// request makes of a workspace what the scheduler looks at. reused names a kept home that it would take again.
func (l *Lifecycle) request(ctx context.Context, w fleet.Workspace, owner fleet.User, freshHome bool) (r fleet.Request, reused string, err error) {
	r = fleet.Request{
		Run: fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch + 1}, Name: w.Name, User: owner.ID, UserName: owner.Name, GPULimit: l.gpuLimit(owner), Spec: w.Pending,
	}
	volumes, err := l.reader.Volumes(ctx, owner.ID, false)
	if err != nil {
		return r, "", err
	}
	home := homeVolume(w.Name)
	mounted := map[string]bool{home: !freshHome}
	for _, u := range w.Pending.Volumes {
		mounted[u.Volume] = true
	}
	for _, v := range volumes {
		if !mounted[v.Name] {
			continue
		}
		if v.Name == home {
			reused = home
		}
		if v.Host != "" && (r.HomeHost == "" || v.Name == home) {
			r.HomeHost, r.HomeVolume = v.Host, v.Name
		}
	}
	return r, reused, nil
}

// gpuLimit is the most devices that a user may have at once; negative: any number.
func (l *Lifecycle) gpuLimit(u fleet.User) int {
	switch {
	case u.GPULimit != nil:
		return *u.GPULimit
	case l.set.GPULimit != nil:
		return *l.set.GPULimit
	}
	return -1
}

// workspacesOf returns all workspaces of a user that are not deleted.
func (l *Lifecycle) workspacesOf(ctx context.Context, owner fleet.UserID) ([]fleet.Workspace, error) {
	var out []fleet.Workspace
	for after := ""; ; {
		page, next, err := l.reader.Workspaces(ctx, fleet.WorkspaceFilter{Owner: owner, Limit: 1000, After: after})
		if err != nil {
			return nil, err
		}
		out = append(out, page...)
		if next == "" {
			return out, nil
		}
		after = next
	}
}

// couldStart checks that a workspace could ever start with what its next run gets, whatever its owner's other ones hold now.
func (l *Lifecycle) couldStart(ctx context.Context, w *fleet.Workspace) error {
	owner, err := l.reader.User(ctx, w.Owner)
	if err != nil {
		return err
	}
	return l.admit(ctx, admission{owner: owner, workspace: w})
}

// mayStart checks that a workspace could start with what its next run gets.
func (l *Lifecycle) mayStart(ctx context.Context, w *fleet.Workspace) error {
	owner, err := l.reader.User(ctx, w.Owner)
	if err != nil {
		return err
	}
	own, err := l.workspacesOf(ctx, w.Owner)
	if err != nil {
		return err
	}
	return l.admit(ctx, admission{owner: owner, workspace: w, own: own})
}
