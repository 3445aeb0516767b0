package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// Sessions finds who a bearer token belongs to.
type Sessions interface {
	// TokenByHash returns a token that holds, and its user. KindUnauthenticated with a sentence.
	TokenByHash(ctx context.Context, hash []byte, now time.Time) (fleet.Token, fleet.User, error)
	// TouchToken notes when a token was used.
	TouchToken(ctx context.Context, id string, now time.Time) error
}

// touchEvery is how exact the last use of a token is: each note is a write.
const touchEvery = time.Minute

// Gate lets a call in: it finds the actor, asks the policy of the resolved procedure, maps errors and contains panics.
type Gate struct {
	sessions Sessions
	now      func() time.Time
	log      *slog.Logger
	calls    openCalls
}

// NewGate returns the interceptor that stands before every handler.
func NewGate(sessions Sessions, now func() time.Time, log *slog.Logger) *Gate {
	return &Gate{sessions: sessions, now: now, log: log}
}

var _ connect.Interceptor = (*Gate)(nil)

// Authenticate returns the actor of a bearer header; nil without one.
func (g *Gate) Authenticate(ctx context.Context, header string) (*auth.Actor, error) {
	if header == "" {
		return nil, nil
	}
	text, ok := strings.CutPrefix(header, "Bearer ")
	if !ok || !strings.HasPrefix(text, auth.TokenPrefix) {
		return nil, fleet.Errorf(fleet.KindUnauthenticated, "the Authorization header must be `Bearer %s...`", auth.TokenPrefix)
	}
	token, user, err := g.sessions.TokenByHash(ctx, auth.Hash(text), g.now())
	if err != nil {
		return nil, err
	}
	return &auth.Actor{User: user, Token: token}, nil
}

func (g *Gate) admit(ctx context.Context, procedure, header string) (context.Context, error) {
	if auth.AccessOf(procedure) == auth.Public {
		return ctx, nil
	}
	actor, err := g.Authenticate(ctx, header)
	if err == nil {
		err = auth.Permit(procedure, actor)
	}
	if err != nil {
		return nil, err
	}
	g.touch(ctx, actor.Token)
	return auth.WithActor(ctx, *actor), nil
}

// touch notes a token's use. A failure is the store's trouble, not the caller's.
func (g *Gate) touch(ctx context.Context, token fleet.Token) {
	now := g.now()
	if now.Sub(token.LastUsedAt) < touchEvery {
		return
	}
	if err := g.sessions.TouchToken(ctx, token.ID, now); err != nil {
		g.log.WarnContext(ctx, "last use of a token not noted", "token", token.ID, "error", err)
	}
}

// WrapUnary implements connect.Interceptor.
func (g *Gate) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		procedure := req.Spec().Procedure
		defer func() { err = g.finish(ctx, procedure, err, recover()) }()
		admitted, err := g.admit(ctx, procedure, req.Header().Get("Authorization"))
		if err != nil {
			return nil, err
		}
		return next(admitted, req)
	}
}

// WrapStreamingClient implements connect.Interceptor; the gateway makes no such calls through it.
func (g *Gate) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (g *Gate) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		procedure, header := conn.Spec().Procedure, conn.RequestHeader().Get("Authorization")
		defer func() { err = g.finish(ctx, procedure, err, recover()) }()
		admitted, err := g.admit(ctx, procedure, header)
		if err != nil {
			return err
		}
		if actor, ok := auth.ActorFrom(admitted); ok {
			var release func()
			ctx, release = g.calls.hold(admitted, actor)
			defer release()
			// Asked again: a revocation between the first answer and the hold would find nothing to cut.
			if admitted, err = g.admit(ctx, procedure, header); err != nil {
				return err
			}
		}
		return next(admitted, conn)
	}
}

// finish logs what an operator must know and returns what a client may see.
func (g *Gate) finish(ctx context.Context, procedure string, err error, panicked any) error {
	if panicked != nil {
		g.log.ErrorContext(ctx, "handler panicked", "procedure", procedure, "panic", fmt.Sprint(panicked), "stack", string(debug.Stack()))
		err = errors.New("panic")
	}
	if err == nil {
		return nil
	}
	var ended, ours *fleet.Error
	if ctx.Err() != nil && errors.As(context.Cause(ctx), &ended) {
		return wireError(ended) // cut by us, with the reason
	}
	switch {
	case !errors.As(err, &ours):
		if !errors.Is(err, context.Canceled) && connect.CodeOf(err) == connect.CodeUnknown {
			g.log.ErrorContext(ctx, "call failed", "procedure", procedure, "error", err)
		}
	case ours.Kind == fleet.KindInternal:
		g.log.ErrorContext(ctx, "call failed", "procedure", procedure, "error", err)
	case ours.Cause != nil && ours.Cause.Error() != "" && ctx.Err() == nil:
		g.log.WarnContext(ctx, "call failed", "procedure", procedure, "error", err) // the cause goes no further than this
	}
	return wireError(err)
}

// actorOf returns the actor that the gate admitted. A handler without one was wired without a gate, which is a programmer's error.
func actorOf(ctx context.Context) auth.Actor {
	actor, ok := auth.ActorFrom(ctx)
	if !ok {
		panic("rpc: a handler was reached without an actor")
	}
	return actor
}
