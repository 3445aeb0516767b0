package fleet

import (
	"fmt"
	"time"
)

// RunKey names one incarnation of a workspace's container.
type RunKey struct {
	Workspace WorkspaceID
	Epoch     int64
}

// ContainerName is the run's name in the engine, which makes a second creation impossible.
func (k RunKey) ContainerName() string { return fmt.Sprintf("carrel-%s-%d", k.Workspace, k.Epoch) }

// Run is one incarnation of a workspace's container. Zero times mean "not yet".
type Run struct {
	Key         RunKey
	Host        HostID
	ImageDigest string
	CPUMillis   int64 // as granted at placement
	MemoryMiB   int64
	ShmMiB      int64
	PidsLimit   int64
	Devices     []DeviceID
	QueuedAt    time.Time
	PlacedAt    time.Time
	StartedAt   time.Time
	ReadyAt     time.Time
	EndedAt     time.Time
	GoneAt      time.Time // commit at which the host was known to hold nothing of it
	Goal        Goal      // GoalRunning or GoalStopped: what its host should make of it
	GoalReason  string    // shown to open sessions when it is stopped
	StopGrace   time.Duration
	ContainerID string
	Reason      Reason
}

// Phase is where a run is, as its agent sees it.
type Phase string

// The phases.
const (
	PhasePulling  Phase = "pulling"
	PhaseStarting Phase = "starting"
	PhaseReady    Phase = "ready"
	PhaseStopping Phase = "stopping"
	PhaseGone     Phase = "gone" // nothing of it can hold a device
)

// ObservedRun is the latest that an agent knows about a run; its times are already on the gateway's time line. Zero times mean unknown.
type ObservedRun struct {
	Key             RunKey
	Phase           Phase
	ContainerID     string
	StartedAt       time.Time
	ReadyAt         time.Time
	EndedAt         time.Time
	EndedUnattested bool // EndedAt is the last moment at which it was seen to run
	Reason          Reason
	OutOfMemory     bool
	PullDone        int64 // bytes
	PullTotal       int64 // bytes, 0 while unknown
	Sudo            string
	ImageDigest     string
	EngineSilent    time.Duration // 0 while the engine answers
}

// Pull is how far an image pull is.
type Pull struct {
	Done  int64 // bytes
	Total int64 // bytes, 0 while unknown
}
