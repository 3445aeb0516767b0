package fleet

import "time"

// LeaseID is opaque.
type LeaseID int64

// Lease binds one device to one run for an interval.
type Lease struct {
	ID         LeaseID
	Device     DeviceID
	Run        RunKey
	Host       HostID
	HostName   string
	Model      string
	User       UserID
	UserName   string
	Project    string
	Pool       string
	Workspace  string    // name at the time
	StartedAt  time.Time // placement commit
	EndedAt    time.Time // end as observed, clamped to [StartedAt, commit]; zero while open
	ReleasedAt time.Time // commit that freed the device; zero while it is held
	// Provisional is set on leases of a host that does not answer: their end may still move.
	Provisional bool
}

// FactKind is what a ledger row states.
type FactKind string

// The facts of a lease.
const (
	FactOpen   FactKind = "open"
	FactChange FactKind = "change" // user, project, pool or model as billed from At on
	FactEnd    FactKind = "end"
)

// Fact is one append-only row of the ledger.
type Fact struct {
	Lease       LeaseID
	Kind        FactKind
	At          time.Time // from when it holds
	CommittedAt time.Time
	User        UserID
	Project     string
	Pool        string
	Model       string
	Workspace   WorkspaceID
}

// Rate prices one model from a moment on. Model `*` is for models without a rate of their own.
type Rate struct {
	Model         string
	MicrosPerHour int64 // millionths of the currency unit per device-hour
	Currency      string
	From          time.Time
}
