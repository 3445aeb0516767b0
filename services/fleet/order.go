package fleet

import "time"

// NewWorkspace is all that a store needs to record a workspace; the names in it have been checked.
type NewWorkspace struct {
	Workspace Workspace // ID, Name, Owner, Project, Spec, Origins, HostKey set
	RequestID string    // with Owner and Fingerprint it makes a retry return the first answer for 24 h
	// Fingerprint is a digest of the request's content; the same RequestID with another one is KindExists.
	Fingerprint string
	Queue       bool // also queue its first run
	FreshHome   bool // rename a kept home of this name away and begin with an empty one
	HomeVolume  string
	HomeTarget  string
	StopGrace   time.Duration
	MostOfOwner int // most workspaces of the owner that are not deleted, this one included; 0: any number
}

// OrderID names a client's order, so that a retry of it is known for 24 h. One with an empty ID names nothing.
type OrderID struct {
	Actor       UserID // who gave it
	ID          string // drawn by the client
	Fingerprint string // of its content; the same ID with another one is KindExists
}

// StartOrder asks for a run.
type StartOrder struct {
	Workspace WorkspaceID
	Order     OrderID
}

// StopOrder asks a run to end.
type StopOrder struct {
	Workspace WorkspaceID
	Goal      Goal   // GoalStopped or GoalDeleted; GoalRunning with Restart
	Restart   bool   // start again with the same devices once it is gone
	DropHome  bool   // with GoalDeleted: delete the home volume too
	Reason    Reason // recorded, and shown to open sessions
	Grace     time.Duration
	Spec      *Spec // with Restart: what the next run gets, when it differs
	// Refused is the epoch of a waiting run that can never start: its workspace fails. Nothing happens when that run does not wait any more.
	Refused int64
	Order   OrderID // a second one does nothing
}

// SpecChange changes what the next run gets.
type SpecChange struct {
	Workspace WorkspaceID
	Spec      Spec
	Origins   map[string]string
	IfVersion int64 // 0: whatever it is
}

// Step is what one observation makes of a workspace and its run; a store carries it out in the observation's own transaction.
type Step struct {
	State   State
	Reason  Reason // replaces the workspace's when Code is not empty
	Sudo    string
	Run     ObservedRun // times and container id to record; zero fields leave what is there
	Release bool        // nothing of the run can hold its devices: end its leases at EndedAt, release them now
	EndedAt time.Time   // the end as observed; the store clamps it to [lease start, now]
	// Requeue makes a new run at once. With Keep its host and devices pass over in the same transaction, before anyone else's turn.
	Requeue bool
	Keep    bool
	Delete  bool // the workspace becomes deleted
}

// Committed is what a plan's transaction changed.
type Committed struct {
	Placed  []Placement
	Dropped []RunKey // placements that no longer held when they were re-checked; the next plan looks at them again
	Hosts   []HostID // whose desired state changed
	Changed []WorkspaceID
}

// Changes is what an observation's transaction changed.
type Changes struct {
	Workspaces []WorkspaceID
	Hosts      []HostID // whose desired state changed
	Freed      bool     // devices, CPU or memory became free, or a host became usable: plan again
	Stale      bool     // the observation was of an older session or already known, and was ignored
	Unknown    []RunKey // runs that the store does not know
}

// DesiredHost is the full desired state of a host.
type DesiredHost struct {
	Host        HostID
	Stamp       Stamp
	Runs        []DesiredRun
	VolumesGone []VolumeID
	Excluded    []DeviceID
}

// DesiredRun is one run as its host should make it.
type DesiredRun struct {
	Run       Run
	Workspace Workspace
	Owner     User
	Keys      []DeviceKey
	Mounts    []Mount
	PoolSudo  bool
	Simulated map[DeviceID]bool
}

// WorkspaceFilter chooses a page of workspaces.
type WorkspaceFilter struct {
	Owner          UserID // empty: everybody's
	IncludeDeleted bool
	Limit          int
	After          string // opaque, from the page before
}

// WorkspaceView is a workspace with what stands around it, for showing.
type WorkspaceView struct {
	Workspace        Workspace
	Run              Run
	Leases           []Lease
	Devices          []Device
	Mounts           []Mount
	HostName         string
	UnreachableSince time.Time // filled in by the caller that knows the links
	OwnerLogin       string
}

// UsageRow is device time of one lease segment group, in integer milliseconds.
type UsageRow struct {
	Key                                string
	GPUMs, ActiveMs, IdleMs, UnknownMs int64
	CostMicros                         int64
	Leases                             int
	Open, Provisional                  bool
	StartedAt, EndedAt                 time.Time // rows per lease only
	FullMs                             int64
}

// UsageQuery chooses rows and window of a report.
type UsageQuery struct {
	By        string // user, project, pool, model, workspace, day, lease
	From, To  time.Time
	Location  *time.Location
	User      UserID
	Project   string
	Pool      string
	Workspace WorkspaceID
	Now       time.Time // an open lease counts up to here
}

// UsageReport is a report's rows and their sum.
type UsageReport struct {
	Rows     []UsageRow
	Total    UsageRow
	From, To time.Time
	Currency string
}

// JoinGrant is what a join token permits.
type JoinGrant struct {
	Hash      []byte
	Pool      string
	Host      string // name that may use it; empty: any
	ExpiresAt time.Time
}

// DeviceFilter chooses devices.
type DeviceFilter struct {
	Pool     string // empty: all
	Host     HostID // empty: all
	FreeOnly bool   // neither leased nor blocked, and leasable
}

// DeviceRow is a device with who holds it.
type DeviceRow struct {
	Device
	HostName string
	Pool     string
	Lease    *Lease // nil when nobody holds it
	Free     bool   // leasable, not leased, not named by a container that the gateway did not ask for
}

// Event is one line of a workspace's story.
type Event struct {
	Workspace WorkspaceID
	Epoch     int64
	At        time.Time
	State     State  // after it
	Code      string // stable word, may be empty
	Message   string
}
