package auth

import (
	"slices"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Access is the least that a caller must be.
type Access uint8

// The levels. The zero value refuses everybody, so that a procedure without an entry is shut.
const (
	Nobody Access = iota
	Public        // no session needed
	Member        // any enabled user; objects are checked by owner
	Admin
)

var accessNames = [...]string{"nobody", "public", "member", "admin"}

// String returns the level's word.
func (a Access) String() string { return accessNames[a] }

// policy lists every procedure. A procedure that is not here is refused.
var policy = map[string]Access{
	"/carrel.v1.AuthService/ServerInfo":      Public,
	"/carrel.v1.AuthService/SignIn":          Public,
	"/carrel.v1.AuthService/SignOut":         Member,
	"/carrel.v1.AuthService/WhoAmI":          Member,
	"/carrel.v1.AuthService/ListTokens":      Member,
	"/carrel.v1.AuthService/RevokeToken":     Member,
	"/carrel.v1.AuthService/AddDeviceKey":    Member,
	"/carrel.v1.AuthService/ListDeviceKeys":  Member,
	"/carrel.v1.AuthService/RevokeDeviceKey": Member,

	"/carrel.v1.AttachService/CreateTicket": Member,
	"/carrel.v1.AttachService/SshConfig":    Member,

	"/carrel.v1.WorkspaceService/Create":  Member,
	"/carrel.v1.WorkspaceService/Plan":    Member,
	"/carrel.v1.WorkspaceService/Get":     Member,
	"/carrel.v1.WorkspaceService/List":    Member,
	"/carrel.v1.WorkspaceService/Update":  Member,
	"/carrel.v1.WorkspaceService/Start":   Member,
	"/carrel.v1.WorkspaceService/Stop":    Member,
	"/carrel.v1.WorkspaceService/Restart": Member,
	"/carrel.v1.WorkspaceService/Delete":  Member,
	"/carrel.v1.WorkspaceService/Watch":   Member,
	"/carrel.v1.WorkspaceService/Logs":    Member,

	"/carrel.v1.DeviceService/List":        Member,
	"/carrel.v1.DeviceService/Watch":       Member,
	"/carrel.v1.DeviceService/SetExcluded": Admin,

	"/carrel.v1.HostService/List":            Member,
	"/carrel.v1.HostService/Watch":           Member,
	"/carrel.v1.HostService/CreateJoinToken": Admin,
	"/carrel.v1.HostService/SetDraining":     Admin,
	"/carrel.v1.HostService/Fence":           Admin,
	"/carrel.v1.HostService/Join":            Public,
	"/carrel.v1.HostService/Challenge":       Public,

	"/carrel.v1.PoolService/List":   Member,
	"/carrel.v1.PoolService/Watch":  Member,
	"/carrel.v1.PoolService/Create": Admin,
	"/carrel.v1.PoolService/Update": Admin,

	"/carrel.v1.ImageService/List":   Member,
	"/carrel.v1.ImageService/Add":    Admin,
	"/carrel.v1.ImageService/Remove": Admin,

	"/carrel.v1.VolumeService/List":    Member,
	"/carrel.v1.VolumeService/Delete":  Member,
	"/carrel.v1.VolumeService/Restore": Member,

	"/carrel.v1.UsageService/Report":    Member,
	"/carrel.v1.UsageService/Check":     Admin,
	"/carrel.v1.UsageService/ListRates": Member,
	"/carrel.v1.UsageService/SetRate":   Admin,

	"/carrel.v1.UserService/List":          Member,
	"/carrel.v1.UserService/Add":           Admin,
	"/carrel.v1.UserService/Update":        Admin,
	"/carrel.v1.UserService/CreateSignIn":  Admin,
	"/carrel.v1.UserService/ListProjects":  Member,
	"/carrel.v1.UserService/CreateProject": Admin,
}

// AccessOf returns what a procedure asks for; Nobody when it has no entry.
func AccessOf(procedure string) Access { return policy[procedure] }

// Procedures returns all procedures that have an entry, sorted.
func Procedures() []string {
	all := make([]string, 0, len(policy))
	for p := range policy {
		all = append(all, p)
	}
	slices.Sort(all)
	return all
}

// Permit reports whether an actor may call a procedure. KindUnauthenticated without a session where one is needed, KindForbidden otherwise.
func Permit(procedure string, actor *Actor) error {
	need := AccessOf(procedure)
	switch {
	case need == Public:
		return nil
	case need == Nobody:
		return fleet.Errorf(fleet.KindForbidden, "%s is not open to anybody", procedure)
	case actor == nil:
		return fleet.Errorf(fleet.KindUnauthenticated, "sign in first: `carrel login LINK`; an admin prints a link with `carrel user sign-in NAME`")
	case actor.User.Disabled:
		return fleet.Errorf(fleet.KindUnauthenticated, "the account %s is disabled; ask an admin", actor.User.Name)
	case need == Admin && !actor.Admin():
		return fleet.Errorf(fleet.KindForbidden, "only an admin may do this; you are signed in as %s", actor.User.Name)
	}
	return nil
}
