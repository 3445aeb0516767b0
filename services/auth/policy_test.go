package auth_test

import (
	"testing"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// D12: what has no entry is shut, for admins too. That each procedure has one is a test of services/gateway.
func TestPermit(t *testing.T) {
	actor := func(role fleet.Role, disabled bool) *auth.Actor {
		return &auth.Actor{User: fleet.User{Name: "ana", Role: role, Disabled: disabled}}
	}
	member, admin, disabled, strange := actor(fleet.RoleMember, false), actor(fleet.RoleAdmin, false), actor(fleet.RoleAdmin, true), actor("owner", false)
	const (
		open  = "/carrel.v1.AuthService/ServerInfo"
		all   = "/carrel.v1.WorkspaceService/List"
		few   = "/carrel.v1.UserService/Add"
		none  = "/carrel.v1.UserService/add"
		bare  = "carrel.v1.UserService/Add"
		empty = ""
	)
	ok := fleet.Kind(255)
	for _, c := range []struct {
		procedure string
		actor     *auth.Actor
		want      fleet.Kind
	}{
		{open, nil, ok},
		{open, member, ok},
		{open, disabled, ok},
		{all, nil, fleet.KindUnauthenticated},
		{all, member, ok},
		{all, admin, ok},
		{all, disabled, fleet.KindUnauthenticated},
		{all, strange, ok},
		{few, nil, fleet.KindUnauthenticated},
		{few, member, fleet.KindForbidden},
		{few, admin, ok},
		{few, disabled, fleet.KindUnauthenticated},
		{few, strange, fleet.KindForbidden},
		{none, nil, fleet.KindForbidden},
		{none, admin, fleet.KindForbidden},
		{bare, admin, fleet.KindForbidden},
		{empty, admin, fleet.KindForbidden},
	} {
		err := auth.Permit(c.procedure, c.actor)
		if (err == nil) != (c.want == ok) || (err != nil && fleet.KindOf(err) != c.want) {
			t.Errorf("%s as %+v: %v", c.procedure, c.actor, err)
		}
	}
	for _, p := range auth.Procedures() {
		if auth.AccessOf(p) == auth.Nobody || auth.AccessOf(p).String() == "nobody" {
			t.Errorf("%s is in the table and shut", p)
		}
	}
}
