package fleet

import (
	"maps"
	"slices"
	"time"
)

// WorkspaceID is opaque, `[a-z0-9]`, never reused.
type WorkspaceID string

// State is where a workspace is in its life.
type State string

// The states. Unreachable is not one: it is a property of the host.
const (
	StateQueued   State = "queued"
	StatePulling  State = "pulling"
	StateStarting State = "starting"
	StateRunning  State = "running"
	StateStopping State = "stopping"
	StateStopped  State = "stopped"
	StateFailed   State = "failed"
	StateDeleted  State = "deleted"
)

// transitions is the one table of a workspace's life. A state may always stay as it is.
var transitions = map[State][]State{
	StateQueued:   {StatePulling, StateStarting, StateRunning, StateStopping, StateStopped, StateFailed, StateDeleted},
	StatePulling:  {StateStarting, StateRunning, StateStopping, StateStopped, StateFailed, StateQueued},
	StateStarting: {StatePulling, StateRunning, StateStopping, StateStopped, StateFailed, StateQueued},
	StateRunning:  {StateStopping, StateStopped, StateFailed, StateQueued},
	StateStopping: {StateStopped, StateFailed, StateDeleted, StateQueued},
	StateStopped:  {StateQueued, StateDeleted},
	StateFailed:   {StateQueued, StateDeleted, StateStopped},
	StateDeleted:  {},
}

// CanBecome reports whether the table allows a step.
func (s State) CanBecome(next State) bool {
	if s == next {
		return true
	}
	for _, t := range transitions[s] {
		if t == next {
			return true
		}
	}
	return false
}

// Live reports whether a run exists or is wanted: queued, pulling, starting, running or stopping.
func (s State) Live() bool {
	switch s {
	case StateQueued, StatePulling, StateStarting, StateRunning, StateStopping:
		return true
	case StateStopped, StateFailed, StateDeleted:
		return false
	}
	return false
}

// Placed reports whether a host may hold something of it.
func (s State) Placed() bool { return s.Live() && s != StateQueued }

// States returns all states in the order of a life.
func States() []State {
	return []State{StateQueued, StatePulling, StateStarting, StateRunning, StateStopping, StateStopped, StateFailed, StateDeleted}
}

// Goal is what the owner wants of a workspace.
type Goal string

// The goals.
const (
	GoalRunning Goal = "running"
	GoalStopped Goal = "stopped"
	GoalDeleted Goal = "deleted"
)

// GPURequest is what a workspace asks for: Count whole devices of one model, any of Models (empty: any).
type GPURequest struct {
	Count  int
	Models []string
}

// VolumeUse puts a volume or an admin-declared mount into a workspace.
type VolumeUse struct {
	Volume   string // volume name, or name of a declared mount
	Target   string // absolute path inside
	ReadOnly bool
}

// Spec is what a workspace was asked to be. Zero sizes mean "the host's share", settled at placement.
type Spec struct {
	Pool        string
	Image       string // reference as asked for
	ImageDigest string // `sha256:...`, recorded at creation
	ImageHost   HostID // set when the digest exists on one host only
	RequireCUDA string // the image's NVIDIA_REQUIRE_CUDA
	GPU         GPURequest
	CPUMillis   int64 // thousandths of a core
	MemoryMiB   int64
	ShmMiB      int64
	PidsLimit   int64
	Env         map[string]string
	Volumes     []VolumeUse
}

// Reason says why a workspace is in its state.
type Reason struct {
	Code     string // stable word
	Message  string // one sentence: what happened and what to change
	ExitCode *int
	LogTail  []string
}

// Workspace is what a person owns.
type Workspace struct {
	ID        WorkspaceID
	Name      string
	Owner     UserID
	OwnerName string // joined, for display
	Project   string
	Spec      Spec
	Pending   Spec // what the next run will get; equal to Spec when nothing is pending
	Origins   map[string]string
	Goal      Goal
	State     State
	Reason    Reason
	Epoch     int64 // of the current or last run; 0 before the first
	CreatedAt time.Time
	DeletedAt time.Time // zero while it is not
	Version   int64     // grows at every change
	Restart   bool      // stopping only to start again with the same devices
	DropHome  bool      // delete the home volume once stopped (goal deleted)
	Sudo      string    // as observed: `yes`, `no: pool`, `no: image has no sudo`
	ReusedVol string    // name of the kept home that was taken again
	HostKey   []byte    // sealed host key
}

// SSHPrincipal is the one principal of the workspace's host certificate.
func (w *Workspace) SSHPrincipal() string { return w.Name + ".carrel." + string(w.ID) }

// SSHHost is the alias of the default deployment.
func (w *Workspace) SSHHost() string { return w.Name + ".carrel" }

// WorkspaceLimit is the error of a user who has as many workspaces as are allowed.
func WorkspaceLimit(has, limit int) error {
	return Errorf(KindExhausted, "your limit is %d workspaces and you have %d; remove one that you no longer need (`carrel ls` shows them, `carrel rm NAME` keeps its volumes), or ask an admin to raise limits.workspaces_per_user", limit, has)
}

// SpecDifference names the fields in which two specs differ, by their names on the wire.
func SpecDifference(a, b Spec) []string {
	var fields []string
	note := func(differ bool, name string) {
		if differ {
			fields = append(fields, name)
		}
	}
	note(a.Pool != b.Pool, "pool")
	note(a.Image != b.Image || a.ImageDigest != b.ImageDigest, "image")
	note(a.GPU.Count != b.GPU.Count || !slices.Equal(a.GPU.Models, b.GPU.Models), "gpu")
	note(a.CPUMillis != b.CPUMillis, "cpu_millis")
	note(a.MemoryMiB != b.MemoryMiB, "memory_mib")
	note(a.ShmMiB != b.ShmMiB, "shm_mib")
	note(a.PidsLimit != b.PidsLimit, "pids_limit")
	note(!maps.Equal(a.Env, b.Env), "env")
	note(!slices.Equal(a.Volumes, b.Volumes), "volumes")
	return fields
}
