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
	workspace fleet.Workspace // Pending is what it would get
	own       []fleet.Workspace
	snapshot  fleet.Snapshot
	freshHome bool
}

// admit refuses what can never start as things are, and what the owner's limit does not allow now (CLI-11, SCHED-09). What merely has
// to wait is admitted. Two orders at the same moment may both be admitted; the plan's commit lets only one of them start.
func (l *Lifecycle) admit(ctx context.Context, a admission) error {
	r, _, err := l.request(ctx, a.workspace, a.owner, a.freshHome)
	if err != nil {
		return err
	}
	if err := scheduler.Feasible(a.snapshot, r, l.set.Scheduler); err != nil {
		return err
	}
	return withinLimit(r, a)
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
func (l *Lifecycle) couldStart(ctx context.Context, w fleet.Workspace) error {
	owner, err := l.reader.User(ctx, w.Owner)
	if err != nil {
		return err
	}
	snapshot, err := l.store.Snapshot(ctx, l.Connected)
	if err != nil {
		return err
	}
	return l.admit(ctx, admission{owner: owner, workspace: w, snapshot: snapshot})
}

// mayStart checks that a workspace could start with what its next run gets.
func (l *Lifecycle) mayStart(ctx context.Context, w fleet.Workspace) error {
	owner, err := l.reader.User(ctx, w.Owner)
	if err != nil {
		return err
	}
	own, err := l.workspacesOf(ctx, w.Owner)
	if err != nil {
		return err
	}
	snapshot, err := l.store.Snapshot(ctx, l.Connected)
	if err != nil {
		return err
	}
	return l.admit(ctx, admission{owner: owner, workspace: w, own: own, snapshot: snapshot})
}
