package rpc

import (
	"context"
	"sync"

	"github.com/carrel-dev/carrel/services/auth"
)

// openCalls holds the streaming calls of signed-in clients, so that what a revoked sign-in still reads can be cut. The zero value is
// ready.
type openCalls struct {
	mu   sync.Mutex
	open map[*openCall]struct{}
}

type openCall struct {
	user, token string
	cancel      context.CancelCauseFunc
}

// hold notes a call until release; its context ends with the reason of a cut.
func (c *openCalls) hold(ctx context.Context, actor auth.Actor) (held context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	call := &openCall{user: string(actor.User.ID), token: actor.Token.ID, cancel: cancel}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = map[*openCall]struct{}{}
	}
	c.open[call] = struct{}{}
	return ctx, func() {
		c.mu.Lock()
		delete(c.open, call)
		c.mu.Unlock()
		cancel(nil)
	}
}

func (c *openCalls) cut(reason error, match func(*openCall) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for call := range c.open {
		if match(call) {
			call.cancel(reason)
		}
	}
}

// CloseToken ends the streaming calls made with a token; their clients see reason.
func (g *Gate) CloseToken(token string, reason error) {
	g.calls.cut(reason, func(c *openCall) bool { return c.token == token })
}

// CloseUser ends the streaming calls of a user; their clients see reason.
func (g *Gate) CloseUser(user string, reason error) {
	g.calls.cut(reason, func(c *openCall) bool { return c.user == user })
}
