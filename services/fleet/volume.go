package fleet

import "time"

// VolumeID is opaque; the data lies under it.
type VolumeID string

// VolumeRetention is how long a deleted volume can be restored (DESIGN D14).
const VolumeRetention = 7 * 24 * time.Hour

// Volume outlives workspaces.
type Volume struct {
	ID        VolumeID
	Name      string
	Owner     UserID
	OwnerName string
	Host      HostID // empty until first placed
	HostName  string
	HomeOf    string // workspace name whose home it is or was
	CreatedAt time.Time
	DeletedAt time.Time
	RemovedAt time.Time // when a host said that the data is gone
	UsedBy    []string  // names of workspaces that mount it and are not stopped
}

// Mount is a volume or a declared host path as a run gets it.
type Mount struct {
	Volume   VolumeID // empty for a declared mount
	HostPath string   // for a declared mount
	Name     string
	Target   string
	ReadOnly bool
	Home     bool
	Public   bool
}

// DeclaredMount is a host path that an admin offers under a name.
type DeclaredMount struct {
	Name     string
	HostPath string
	ReadOnly bool
	Public   bool // may be used beside sudo when read-only
}
