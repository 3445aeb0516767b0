package host

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// Runtime is a container engine. Every call ends within a limit of its own. An error of KindUnavailable means that the engine
// gave no answer, which says nothing about what is there; KindNotFound and KindConflict are the engine's own answers.
type Runtime interface {
	Engine
	Containers
	Images
	Volumes
}

// Engine tells about the engine itself.
type Engine interface {
	// Info returns what the engine is and can do.
	Info(ctx context.Context) (EngineInfo, error)
	// Probe tries what only a try can tell. It makes containers of its own and removes them.
	Probe(ctx context.Context, p ProbeRequest) (ProbeResult, error)
}

// Containers makes, ends and watches containers.
type Containers interface {
	// Create makes a container and returns its id. KindConflict: the name is taken. KindNotFound: the image is not there.
	Create(ctx context.Context, spec Spec) (id string, err error)
	// Start starts it; one that runs already is no error.
	Start(ctx context.Context, id string) error
	// Stop ends it: the polite signal, then after grace the hard one. One that does not run is no error.
	Stop(ctx context.Context, id string, grace time.Duration) error
	// Remove removes it, running or not. One that is not there is no error. Its named volumes stay.
	Remove(ctx context.Context, id string) error
	// Inspect finds a container by id or name.
	Inspect(ctx context.Context, idOrName string) (Container, error)
	// List returns all containers of the engine, also those that do not run and those of others.
	List(ctx context.Context) ([]Container, error)
	// Events calls each with what happens from since on. It calls live once it listens, and returns only with an error.
	Events(ctx context.Context, since time.Time, live func(), each func(Event)) error
	// Logs calls each with the lines that the first process wrote.
	Logs(ctx context.Context, id string, q LogQuery, each func(at time.Time, line string) error) error
	// Usage reads what a running container uses.
	Usage(ctx context.Context, id string) (Usage, error)
}

// Images finds and fetches images.
type Images interface {
	// Image finds an image that the engine has, by reference or id.
	Image(ctx context.Context, ref string) (Image, error)
	// Pull fetches an image; each is called with its progress. It returns nil only when the engine says that all of it is there.
	Pull(ctx context.Context, ref string, each func(PullProgress)) error
	// Resolve asks the reference's registry for its digest.
	Resolve(ctx context.Context, ref string) (digest string, err error)
}

// Volumes names directories for the engine.
type Volumes interface {
	// EnsureVolume makes the engine know a directory under a name. KindConflict: the name stands for something else.
	EnsureVolume(ctx context.Context, name, dir string) error
	// RemoveVolume forgets the name, and never touches the directory. A name that is not there is no error.
	RemoveVolume(ctx context.Context, name string) error
}

// EngineInfo is what an engine is and can do.
type EngineInfo struct {
	Version  string            // "20.10.24"
	API      string            // negotiated, "1.41"
	OS       string            // operating system and kernel
	Parts    map[string]string // versions of runc, containerd
	CDI      bool              // it takes devices by CDI name
	CPUs     int
	Memory   int64 // bytes
	Warnings []string
}

// Spec is a container to be made. It knows nothing of the engine.
type Spec struct {
	Key       Key
	Image     string // engine's id of the image
	Hostname  string
	Env       []string // NAME=value, sorted; they win over the image's
	Labels    map[string]string
	GPUs      []string // UUIDs of real devices
	Mounts    []SpecMount
	CPUMillis int64
	MemoryMiB int64
	ShmMiB    int64
	Pids      int64
	Sudo      bool
	Stop      time.Duration
	// InitFile is carrel-init on the host, LinkDir the directory with the run's socket. Both are mounted read-only.
	InitFile string
	LinkDir  string
}

// SpecMount is a mount of a container: a volume's name or a host directory.
type SpecMount struct {
	Volume   string
	HostPath string
	Target   string
	ReadOnly bool
}

// State is a container's state in the engine's words.
type State string

// The states of a container.
const (
	StateCreated    State = "created"
	StateRunning    State = "running"
	StatePaused     State = "paused"
	StateRestarting State = "restarting"
	StateRemoving   State = "removing"
	StateExited     State = "exited"
	StateDead       State = "dead"
)

// Running reports whether processes of the container may live.
func (s State) Running() bool { return s == StateRunning || s == StatePaused || s == StateRestarting }

// Container is what an engine says of a container. List leaves out what follows Labels.
type Container struct {
	ID     string
	Name   string // without a leading slash
	State  State
	Labels map[string]string

	PID         int
	StartedAt   time.Time // engine's wall clock; zero when it never started
	FinishedAt  time.Time // of its last end
	ExitCode    int
	OutOfMemory bool
	StartError  string // what the engine said when it could not start it
}

// EventKind is what happened to a container.
type EventKind string

// The events that matter here.
const (
	EventDie     EventKind = "die"
	EventOOM     EventKind = "oom"
	EventDestroy EventKind = "destroy"
	EventOther   EventKind = "other"
)

// Event is something that happened to a container.
type Event struct {
	Kind     EventKind
	ID       string
	At       time.Time // engine's wall clock
	ExitCode int       // of a die event
}

// LogQuery chooses lines.
type LogQuery struct {
	Follow bool
	Tail   int // last lines to begin with; 0: all
}

// Usage is what a container uses.
type Usage struct {
	CPU         time.Duration // since it started
	MemoryBytes int64         // without the page cache that the kernel would give back first
}

// Image is an image that an engine has.
type Image struct {
	ID      string // `sha256:...`; what it hashes differs by engine
	Digests []string
	Labels  map[string]string
	Env     []string
	Bytes   int64
}

// PullProgress is how far a pull is.
type PullProgress struct {
	Done   int64  // bytes fetched
	Total  int64  // bytes of all layers known; 0 while unknown
	Moment string // changes whenever anything went on, bytes or not
}

// ProbeRequest says what to try.
type ProbeRequest struct {
	InitFile string // a static program for the probe's image
	Device   string // UUID of a device to ask for; empty: GPUs are not tried
}

// ProbeResult is what a try showed; an empty string is good news.
type ProbeResult struct {
	GPU         string // why the engine gives no GPU to containers
	Isolation   string // why containers reach each other
	Unavailable string // why it could not be tried
}

// GPUs is where devices and their measurements come from.
type GPUs interface {
	Inventory(ctx context.Context) (gpu.Inventory, error)
	Sample(ctx context.Context) ([]gpu.Sample, error)
}

// Inside is the way to carrel-init in each run.
type Inside interface {
	// Prepare makes the run's directory, which its container sees read-only, and listens in it.
	Prepare(key Key) (dir string, err error)
	// Attach says which process on the host is the run's first; only it and its children are listened to.
	Attach(key Key, pid int) error
	// Configure gives carrel-init its full configuration, waiting for its connection until ctx ends. KindInvalid is
	// carrel-init's word that the configuration cannot be.
	Configure(ctx context.Context, key Key, c InsideConfig) (InsideAnswer, error)
	// Stop tells open sessions why they end, and begins to end everything inside.
	Stop(ctx context.Context, key Key, reason string, grace time.Duration) error
	// Forget closes all that belongs to the run and removes its directory.
	Forget(key Key)
}

// InsideConfig is what carrel-init must know.
type InsideConfig struct {
	Identity Identity
	Home     string
	Sudo     bool
	SSH      SSH
	Env      map[string]string
	Hostname string
}

// InsideAnswer is what carrel-init found.
type InsideAnswer struct {
	Sudo  string // `yes`, `no: pool`, `no: image has no sudo`
	Shell string // empty when the image has none
}
