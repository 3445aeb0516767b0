// Package host makes one machine's containers match what its gateway wants, and reports what it observes there.
package host

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Key names one incarnation of a workspace's container.
type Key struct {
	Workspace string
	Epoch     int64
}

// Container is the run's name in the engine. The engine allows a name once, which makes a second container of a run impossible.
func (k Key) Container() string { return fmt.Sprintf("carrel-%s-%d", k.Workspace, k.Epoch) }

// String is `<workspace>/<epoch>`, the form in which processes name the run that they belong to.
func (k Key) String() string { return k.Workspace + "/" + strconv.FormatInt(k.Epoch, 10) }

// ParseKey reads what [Key.String] wrote.
func ParseKey(s string) (Key, bool) {
	workspace, epoch, found := strings.Cut(s, "/")
	n, err := strconv.ParseInt(epoch, 10, 64)
	k := Key{Workspace: workspace, Epoch: n}
	return k, found && err == nil && k.valid()
}

var (
	workspaceID   = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
	volumeID      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)
	containerName = regexp.MustCompile(`^carrel-([a-z0-9]{1,64})-([1-9][0-9]{0,17})$`)
)

func (k Key) valid() bool { return workspaceID.MatchString(k.Workspace) && k.Epoch > 0 }

// keyOfName reads a container's name.
func keyOfName(name string) (Key, bool) {
	m := containerName.FindStringSubmatch(name)
	if m == nil {
		return Key{}, false
	}
	return ParseKey(m[1] + "/" + m[2])
}

// Stamp orders what a gateway sends; see carrel.agent.v1.Stamp.
type Stamp struct {
	Database   int64 `json:"database"`
	Session    int64 `json:"session"`
	Generation int64 `json:"generation"`
}

// Less compares field by field.
func (s Stamp) Less(other Stamp) bool {
	switch {
	case s.Database != other.Database:
		return s.Database < other.Database
	case s.Session != other.Session:
		return s.Session < other.Session
	}
	return s.Generation < other.Generation
}

// Goal is what the gateway wants of a run.
type Goal string

// The goals. A run that no one names has none, and is left alone.
const (
	GoalRunning Goal = "running"
	GoalGone    Goal = "gone"
)

// Grant is one leased device.
type Grant struct {
	ID        string
	Simulated bool // the engine is never asked for it
}

// Mount is one mount of a run: a volume of ours, or a host path that an admin declared.
type Mount struct {
	Volume   string // volume id; empty for a declared mount
	HostPath string // absolute; empty for a volume
	Target   string // absolute path inside
	ReadOnly bool
	Home     bool
	Name     string // for messages
	Public   bool   // a declared mount that may stand beside sudo while it is read-only
}

// Group is a POSIX group.
type Group struct {
	Name string
	GID  int64
}

// Identity is who the user is inside.
type Identity struct {
	Login  string
	UID    int64
	GID    int64
	Groups []Group
}

// SSH is what the run's SSH server needs. HostKey is secret: it is never logged and never written to disk here.
type SSH struct {
	HostKey         []byte
	HostCertificate string
	AuthorizedKeys  []string
}

// Desired is what one run should be. There is no field that could ask the engine for more than a workspace may have.
type Desired struct {
	Key            Key
	Goal           Goal
	Name           string // workspace name, the host name inside
	Owner          string
	ImageReference string
	ImageDigest    string
	Identity       Identity
	CPUMillis      int64
	MemoryMiB      int64
	ShmMiB         int64
	PidsLimit      int64
	Devices        []Grant
	Mounts         []Mount
	Env            map[string]string
	Sudo           bool
	SSH            SSH
	StopGrace      time.Duration
	Project        string
	Pool           string
	Reason         string // why it should be gone; shown to open sessions
}

// Set is the full desired state of a host.
type Set struct {
	Runs            []Desired
	VolumesGone     []string
	ExcludedDevices []string
	Deployment      string
}

// Phase is where a run is.
type Phase string

// The phases. Gone means that nothing of the run can hold a device any more.
const (
	PhasePulling  Phase = "pulling"
	PhaseStarting Phase = "starting"
	PhaseReady    Phase = "ready"
	PhaseStopping Phase = "stopping"
	PhaseGone     Phase = "gone"
)

// The reason codes.
const (
	ReasonStopped       = "stopped"           // the gateway wanted it gone
	ReasonExited        = "exited"            // its first process ended
	ReasonKilled        = "killed_outside"    // a signal from outside ended it
	ReasonOutOfMemory   = "out_of_memory"     // its memory limit ended it
	ReasonMemoryInside  = "out_of_memory_one" // a program inside was ended for memory, the workspace goes on
	ReasonRemoved       = "removed_outside"   // the container was removed by somebody else
	ReasonRestarted     = "restarted_outside" // somebody else restarted the container
	ReasonRebooted      = "host_rebooted"
	ReasonRefused       = "refused"         // the host's policy or the request itself forbids it
	ReasonImageNotFound = "image_not_found" // neither the registry nor the engine has it
	ReasonPullFailed    = "pull_failed"
	ReasonDiskFull      = "disk_full"
	ReasonNameTaken     = "name_taken" // a container that is not ours has the name
	ReasonVolumeMissing = "volume_missing"
	ReasonStartFailed   = "start_failed" // the engine refused to make or start it
	ReasonGPURuntime    = "gpu_runtime_missing"
	ReasonNotReady      = "not_ready"   // carrel-init did not answer in time
	ReasonConflict      = "conflict"    // what is there does not agree with what is known; an admin must look
	ReasonDeviceBusy    = "device_busy" // waits until another container gives a device or volume back
	ReasonHostFault     = "host_fault"  // the agent's own disk or set-up; it tries again
)

// Reason says why a run is as it is.
type Reason struct {
	Code    string `json:"code,omitempty"`
	Message string `json:"message,omitempty"` // one sentence: what happened and what to change
}

// Observed is the latest that is known about a run. Ages count back from the moment at which it was made; nil is unknown.
type Observed struct {
	Key             Key
	Seq             int64
	Phase           Phase
	ContainerID     string
	StartedAge      *time.Duration
	ReadyAge        *time.Duration
	EndedAge        *time.Duration
	EndedUnattested bool
	ExitCode        *int
	OutOfMemory     bool
	Reason          Reason
	LogTail         []string
	PullDone        int64
	PullTotal       int64
	Sudo            string
	ImageDigest     string
	EngineSilent    *time.Duration
}
