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
}

// Gate lets a call in: it finds the actor, asks the policy of the resolved procedure, maps errors and contains panics.
type Gate struct {
	sessions Sessions
	now      func() time.Time
	log      *slog.Logger
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
	return auth.WithActor(ctx, *actor), nil
}

// WrapUnary implements connect.Interceptor.
func (g *Gate) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		procedure := req.Spec().Procedure
		defer func() { err = g.finish(ctx, procedure, err, recover()) }()
		ctx, err = g.admit(ctx, procedure, req.Header().Get("Authorization"))
		if err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor; the gateway makes no such calls through it.
func (g *Gate) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (g *Gate) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		procedure := conn.Spec().Procedure
		defer func() { err = g.finish(ctx, procedure, err, recover()) }()
		ctx, err = g.admit(ctx, procedure, conn.RequestHeader().Get("Authorization"))
		if err != nil {
			return err
		}
		return next(ctx, conn)
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
	if fleet.KindOf(err) == fleet.KindInternal && !errors.Is(err, context.Canceled) && connect.CodeOf(err) == connect.CodeUnknown {
		g.log.ErrorContext(ctx, "call failed", "procedure", procedure, "error", err)
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
