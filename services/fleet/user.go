package fleet

import "time"

// UserID is opaque and never reused, so that a new user of an old name inherits nothing.
type UserID string

// Role says what a user may do.
type Role string

// The roles.
const (
	RoleMember Role = "member"
	RoleAdmin  Role = "admin"
)

// Uids that `user add` takes by itself (DESIGN D8), and the lowest that any user may have.
const (
	FirstAutoUID = 10000
	LastAutoUID  = 59999
	LowestUID    = 1000
)

// Group is a POSIX group.
type Group struct {
	Name string
	GID  int64
}

// User is a person with an account.
type User struct {
	ID        UserID
	Name      string
	Login     string
	UID       int64
	GID       int64
	Groups    []Group
	Role      Role
	Project   string
	GPULimit  *int // nil: the deployment's
	Disabled  bool
	DeletedAt time.Time
	CreatedAt time.Time
}

// Project is a team that is billed.
type Project struct {
	Name        string
	Description string
	Members     []string
}

// DefaultProject is where every user starts.
const DefaultProject = "default"

// Token is a signed-in client, without its secret.
type Token struct {
	ID         string
	User       UserID
	UserName   string
	Label      string
	CreatedAt  time.Time
	LastUsedAt time.Time
	ExpiresAt  time.Time
	RevokedAt  time.Time
}

// DeviceKey is an SSH public key that opens a user's workspaces.
type DeviceKey struct {
	ID          string
	User        UserID
	UserName    string
	PublicKey   string // authorized_keys form, without options and comment
	Fingerprint string // SHA256:...
	Label       string
	CreatedAt   time.Time
}

// UserOutcome is what became of one account that was asked for: User is as made when Err is nil, else as asked for.
type UserOutcome struct {
	User User
	Err  error
}
