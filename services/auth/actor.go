package auth

import (
	"context"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Actor is who makes a call.
type Actor struct {
	User  fleet.User
	Token fleet.Token
}

// Admin reports whether the actor may do what admins do.
func (a Actor) Admin() bool { return a.User.Role == fleet.RoleAdmin }

type actorKey struct{}

// WithActor puts the actor into a context.
func WithActor(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

// ActorFrom returns the actor of a context; ok is false for a call without a session.
func ActorFrom(ctx context.Context) (a Actor, ok bool) {
	a, ok = ctx.Value(actorKey{}).(Actor)
	return a, ok
}
