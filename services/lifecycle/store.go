package lifecycle

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Store is the durable state that lifecycle needs. Each method is one transaction; a method that changes something returns only when
// the change is on disk. Errors are fleet.Error where the user can act on them.
type Store interface {
	// Workspace returns one by id, also a deleted one. KindNotFound.
	Workspace(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error)
	// Run returns one run. KindNotFound.
	Run(ctx context.Context, key fleet.RunKey) (fleet.Run, error)
	// CreateWorkspace records a workspace, finds or makes its volumes, and queues its first run when asked. KindExists when the
	// name is taken or the request id was used for something else; KindExhausted when the owner has too many; replay is true when the request id's first answer is returned.
	CreateWorkspace(ctx context.Context, order fleet.NewWorkspace, now time.Time) (w fleet.Workspace, replay bool, err error)
	// Ordered returns the workspace of an order that was carried out under this name before. KindExists when the name was used for another.
	Ordered(ctx context.Context, id fleet.OrderID, now time.Time) (w fleet.Workspace, found bool, err error)
	// QueueRun queues a new run of a stopped or failed workspace (goal running); a live one is returned as it is.
	// One that is stopping gets goal running and starts again, from the queue, once it is gone. An order that was carried out before
	// does nothing.
	QueueRun(ctx context.Context, order fleet.StartOrder, now time.Time) (fleet.Workspace, error)
	// Stop records a StopOrder. A queued run ends at once; a stopped workspace with GoalDeleted is deleted at once. Idempotent.
	// A run that is refused fails. An order that was carried out before does nothing.
	Stop(ctx context.Context, order fleet.StopOrder, now time.Time) (fleet.Workspace, fleet.Changes, error)
	// ChangeSpec records what the next run gets. KindConflict when the version moved on.
	ChangeSpec(ctx context.Context, change fleet.SpecChange, now time.Time) (fleet.Workspace, error)
	// Snapshot returns what the scheduler decides on. connected says which hosts answer now.
	Snapshot(ctx context.Context, connected func(fleet.HostID) bool) (fleet.Snapshot, error)
	// Commit carries out a plan's placements and reservations in one transaction that checks each placement again (devices free, limits,
	// volume writer, CPU and memory). Refusals are not its affair; they are stop orders.
	Commit(ctx context.Context, plan fleet.Plan, now time.Time) (fleet.Committed, error)
	// Observe records a batch from a host; decide says what each run record makes of its workspace. Records of a session older than the
	// host's, or at or below its AfterSeq, are ignored (Stale).
	Observe(ctx context.Context, obs fleet.Observation, now time.Time, decide Decide) (fleet.Changes, error)
	// Desired returns the full desired state of a host, with its stamp.
	Desired(ctx context.Context, host fleet.HostID) (fleet.DesiredHost, error)
	// BeginSession starts a new session of a host and returns it, with the sequence number to observe after.
	BeginSession(ctx context.Context, host fleet.HostID, now time.Time) (session int64, afterSeq int64, journalID string, err error)
	// Seen notes that a host answered, at most once per host and interval that the caller chooses.
	Seen(ctx context.Context, host fleet.HostID, now time.Time) error
	// Fence declares a host lost and ends its leases. Returns how many.
	Fence(ctx context.Context, host fleet.HostID, reason string, now time.Time) (int, fleet.Changes, error)
	// RecordSamples adds measurements to the activity of the leases that hold the devices.
	RecordSamples(ctx context.Context, host fleet.HostID, samples []fleet.Sample, interval time.Duration, now time.Time) error
	// LastCommit returns the newest gateway time in the database, from which time goes on after a restart.
	LastCommit(ctx context.Context) (time.Time, error)
}

// Decide says what an observation makes of a workspace and its run. It is pure. known is false when the record's epoch is not the workspace's present one.
type Decide = func(w fleet.Workspace, run fleet.Run, o fleet.ObservedRun) fleet.Step

// Reader is what lifecycle looks up besides, to check an order before it is recorded.
type Reader interface {
	// User returns one by id. KindNotFound.
	User(ctx context.Context, id fleet.UserID) (fleet.User, error)
	// Workspaces returns a page, and where the next one begins ("" after the last).
	Workspaces(ctx context.Context, filter fleet.WorkspaceFilter) ([]fleet.Workspace, string, error)
	// Pools returns all pools.
	Pools(ctx context.Context) ([]fleet.Pool, error)
	// Images returns the catalogue.
	Images(ctx context.Context) ([]fleet.Image, error)
	// Volumes returns a user's volumes.
	Volumes(ctx context.Context, owner fleet.UserID, includeDeleted bool) ([]fleet.Volume, error)
	// Hosts returns all hosts.
	Hosts(ctx context.Context) ([]fleet.Host, error)
}
