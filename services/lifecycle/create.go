package lifecycle

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/scheduler"
)

// Where a field came from when it was not a default of the host (those are the scheduler's words).
const (
	originAsked   = "asked for"
	originDefault = "default"
)

// longestRequestID is what CreateRequest.request_id promises.
const longestRequestID = 64

// CreateOrder asks for a new workspace.
type CreateOrder struct {
	Owner      fleet.User
	Name       string
	Project    string     // empty: the owner's
	Spec       fleet.Spec // empty fields get defaults; a GPU count of 0 is meant
	RequestID  string     // a retry with the same one and the same content returns the first answer
	Stopped    bool       // create it stopped
	FreshHome  bool       // begin with an empty home although a kept one of this name exists
	DefaultGPU bool       // Spec.GPU.Count was not named: take one
}

// Create makes a workspace and queues its first run. replay is true when a retry got its first answer again.
// KindInvalid, KindExists (name taken), KindExhausted (a limit, or more than any host has), KindNotFound and KindForbidden (image).
func (l *Lifecycle) Create(ctx context.Context, o CreateOrder) (w fleet.Workspace, replay bool, err error) {
	if err := fleet.CheckName("workspace", o.Name); err != nil {
		return fleet.Workspace{}, false, err
	}
	if err := checkRequestID(o.RequestID); err != nil {
		return fleet.Workspace{}, false, err
	}
	own, err := l.workspacesOf(ctx, o.Owner.ID)
	if err != nil {
		return fleet.Workspace{}, false, err
	}
	draft := fleet.Workspace{ID: newWorkspaceID(), Name: o.Name, Owner: o.Owner.ID, Spec: o.Spec}
	if !named(own, o.Name) { // a taken name is a retry or an error, which the store tells apart
		if draft, err = l.complete(ctx, o, own, !o.Stopped); err != nil {
			return fleet.Workspace{}, false, err
		}
	}
	if draft.HostKey, err = l.keys.NewHostKey(string(draft.ID)); err != nil {
		return fleet.Workspace{}, false, fmt.Errorf("make host key of workspace %s: %w", o.Name, err)
	}
	w, replay, err = l.store.CreateWorkspace(ctx, fleet.NewWorkspace{
		Workspace: draft, RequestID: o.RequestID, Fingerprint: fingerprint(o), Queue: !o.Stopped, FreshHome: o.FreshHome,
		HomeVolume: homeVolume(o.Name), HomeTarget: "/home/" + o.Owner.Login, StopGrace: l.set.StopGrace,
		MostOfOwner: l.set.WorkspaceLimit,
	}, l.now())
	if err != nil {
		return fleet.Workspace{}, false, err
	}
	l.remember(w)
	if !replay {
		l.log.Info("workspace created", "workspace", w.ID, "name", w.Name, "owner", o.Owner.Name)
		l.Replan()
		l.changed(ctx, w.ID)
	}
	return w, replay, nil
}

func checkRequestID(id string) error {
	if len(id) > longestRequestID {
		return fleet.Errorf(fleet.KindInvalid, "the request id has %d characters; at most %d are allowed", len(id), longestRequestID)
	}
	return nil
}

func homeVolume(workspace string) string { return workspace + "-home" }

func named(own []fleet.Workspace, name string) bool {
	for i := range own {
		if own[i].Name == name {
			return true
		}
	}
	return false
}

// fingerprint is a digest of what was asked, before defaults, so that a retry is known although defaults moved in between.
func fingerprint(o CreateOrder) string {
	text, err := json.Marshal(struct {
		Name, Project              string
		Spec                       fleet.Spec
		Stopped, FreshHome, AnyGPU bool
	}{o.Name, o.Project, o.Spec, o.Stopped, o.FreshHome, o.DefaultGPU})
	if err != nil {
		panic("fingerprint of a create order: " + err.Error()) // plain strings and numbers always marshal
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// complete checks an order and fills in its defaults; with starts it also checks that the workspace could start.
func (l *Lifecycle) complete(ctx context.Context, o CreateOrder, own []fleet.Workspace, starts bool) (fleet.Workspace, error) {
	if limit := l.set.WorkspaceLimit; limit > 0 && len(own) >= limit { // the store counts again, when it has the last word
		return fleet.Workspace{}, fleet.WorkspaceLimit(len(own), limit)
	}
	w := fleet.Workspace{ID: newWorkspaceID(), Name: o.Name, Owner: o.Owner.ID, OwnerName: o.Owner.Name, Project: cmp.Or(o.Project, o.Owner.Project, fleet.DefaultProject), Goal: fleet.GoalStopped}
	if o.DefaultGPU && o.Spec.GPU.Count == 0 {
		o.Spec.GPU.Count = 1
	}
	o.Spec.ImageDigest, o.Spec.ImageHost, o.Spec.RequireCUDA = "", "", "" // never the client's to say
	spec, origins, err := l.settle(ctx, o.Spec, o.DefaultGPU)
	if err != nil {
		return fleet.Workspace{}, err
	}
	w.Pending, w.Origins = spec, origins
	if starts {
		err = l.admit(ctx, admission{owner: o.Owner, workspace: &w, own: own, freshHome: o.FreshHome})
	} else {
		err = l.nameModels(ctx, &w.Pending)
	}
	w.Spec = w.Pending
	return w, err
}

// settle checks a spec as asked for and fills in pool, image and the pool's own defaults.
func (l *Lifecycle) settle(ctx context.Context, spec fleet.Spec, defaultGPU bool) (fleet.Spec, map[string]string, error) {
	if err := checkSpec(&spec); err != nil {
		return spec, nil, err
	}
	origins := map[string]string{}
	note := func(field string, named bool, from string) {
		if named {
			origins[field] = originAsked
		} else if from != "" {
			origins[field] = from
		}
	}
	note(fieldGPU, !defaultGPU, originDefault)
	note(fieldPool, spec.Pool != "", "default pool")
	pool, err := l.pool(ctx, spec.Pool)
	if err != nil {
		return spec, nil, err
	}
	spec.Pool = pool.Name
	if most := pool.MaxGPUsPerWorkspace; most > 0 && spec.GPU.Count > most {
		return spec, nil, fleet.Errorf(fleet.KindExhausted, "%d GPUs are more than pool %s gives one workspace: at most %d", spec.GPU.Count, pool.Name, most)
	}
	if spec.ImageDigest == "" { // an update of other fields leaves the image as it was pinned
		if origins[fieldImage], err = l.pinImage(ctx, &spec, pool); err != nil {
			return spec, nil, err
		}
	}
	fromPool := "default of pool " + pool.Name
	if spec.CPUMillis > 0 {
		origins[fieldCPU] = originAsked
	} else if pool.DefaultCPUMillis > 0 {
		spec.CPUMillis, origins[fieldCPU] = pool.DefaultCPUMillis, fromPool
	}
	if spec.MemoryMiB > 0 {
		origins[fieldMemory] = originAsked
	} else if pool.DefaultMemoryMiB > 0 {
		spec.MemoryMiB, origins[fieldMemory] = pool.DefaultMemoryMiB, fromPool
	}
	note(fieldShm, spec.ShmMiB > 0, "")
	note(fieldPids, spec.PidsLimit > 0, "")
	return spec, origins, nil
}

// pool finds a pool, or the default one.
func (l *Lifecycle) pool(ctx context.Context, name string) (fleet.Pool, error) {
	pools, err := l.reader.Pools(ctx)
	if err != nil {
		return fleet.Pool{}, err
	}
	var names []string
	for _, p := range pools {
		if p.Name == name || (name == "" && p.Default) {
			return p, nil
		}
		names = append(names, p.Name)
	}
	if name == "" {
		return fleet.Pool{}, fleet.Errorf(fleet.KindConflict, "no pool is the default one; name one of %s", strings.Join(names, ", "))
	}
	return fleet.Pool{}, fleet.Errorf(fleet.KindNotFound, "there is no pool %s; there are %s", clip(name), strings.Join(names, ", "))
}

// nameModels writes model names as the pool's devices do.
func (l *Lifecycle) nameModels(ctx context.Context, spec *fleet.Spec) error {
	snapshot, err := l.picture(ctx, false)
	if err == nil {
		matchModels(spec, snapshot)
	}
	return err
}

// matchModels writes model names as the pool's devices do, whatever their case.
func matchModels(spec *fleet.Spec, s fleet.Snapshot) {
	spec.GPU.Models = slices.Clone(spec.GPU.Models) // may be another spec's too
	for i, name := range spec.GPU.Models {
		for _, h := range s.Hosts {
			for _, d := range h.Devices {
				if h.Pool == spec.Pool && strings.EqualFold(d.Model, name) {
					spec.GPU.Models[i] = d.Model
				}
			}
		}
	}
}

// Preview is what Create would give.
type Preview struct {
	Workspace fleet.Workspace // without id
	StartsNow bool
	Host      string // name of the host that it would start on
	Why       string // why it would wait
}

// Plan tells what Create would give, and changes nothing.
func (l *Lifecycle) Plan(ctx context.Context, o CreateOrder) (Preview, error) {
	if err := fleet.CheckName("workspace", o.Name); err != nil {
		return Preview{}, err
	}
	own, err := l.workspacesOf(ctx, o.Owner.ID)
	if err != nil {
		return Preview{}, err
	}
	if named(own, o.Name) {
		return Preview{}, fleet.Errorf(fleet.KindExists, "you have a workspace %s already", o.Name)
	}
	w, err := l.complete(ctx, o, own, true)
	if err != nil {
		return Preview{}, err
	}
	snapshot, err := l.store.Snapshot(ctx, l.takesOrders)
	if err != nil {
		return Preview{}, err
	}
	l.nameSilence(snapshot)
	r, reused, err := l.request(ctx, w, o.Owner, o.FreshHome)
	if err != nil {
		return Preview{}, err
	}
	now := l.now()
	r.Run, r.SubmittedAt = fleet.RunKey{Workspace: w.ID, Epoch: 1}, now.Add(time.Hour) // behind everybody
	snapshot.Waiting = append(snapshot.Waiting, r)
	out := Preview{Workspace: w}
	out.Workspace.ID, out.Workspace.ReusedVol = "", reused
	preview(&out, scheduler.Plan(snapshot, l.set.Scheduler, now), r.Run, snapshot)
	return out, nil
}

// preview reads one run's fate out of a plan.
func preview(out *Preview, plan fleet.Plan, run fleet.RunKey, s fleet.Snapshot) {
	for _, p := range plan.Placements {
		if p.Run != run {
			continue
		}
		out.StartsNow = true
		spec := &out.Workspace.Spec
		spec.CPUMillis, spec.MemoryMiB, spec.ShmMiB, spec.PidsLimit = p.CPUMillis, p.MemoryMiB, p.ShmMiB, p.PidsLimit
		maps.Copy(out.Workspace.Origins, p.Origins)
		for _, h := range s.Hosts {
			if h.ID == p.Host {
				out.Host = h.Name
			}
		}
	}
	for _, w := range plan.Waits {
		if w.Run == run {
			out.Why = w.Why
		}
	}
	for _, r := range plan.Refusals {
		if r.Run == run {
			out.Why = fleet.UserMessage(r.Err)
		}
	}
}
