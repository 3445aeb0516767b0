package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/rpc"
	"github.com/carrel-dev/carrel/services/tunnel"
)

// headerTicket carries a byte stream's ticket.
const headerTicket = "Carrel-Ticket"

// userDoor lets users' byte streams in: it takes the ticket, asks again whether it still holds, and joins the stream to its host's.
type userDoor struct {
	users interface {
		User(ctx context.Context, id fleet.UserID) (fleet.User, error)
		// Tokens returns a user's tokens that are not revoked.
		Tokens(ctx context.Context, user fleet.UserID) ([]fleet.Token, error)
	}
	workspaces interface {
		Workspace(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error)
	}
	tickets *auth.Tickets[rpc.StreamGrant]
	tunnel  *tunnel.Tunnel
	now     func() time.Time
	log     *slog.Logger
}

func (d *userDoor) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /carrel/attach", d.attach)
}

func (d *userDoor) attach(w http.ResponseWriter, r *http.Request) {
	if !stream.IsUpgrade(r) {
		refuse(w, d.log, fleet.Errorf(fleet.KindInvalid, "this address takes `Upgrade: %s` over HTTP/1.1 only; a proxy on the way may have dropped it", stream.Protocol))
		return
	}
	grant, err := d.admit(r.Context(), r.Header.Get(headerTicket))
	if err != nil {
		refuse(w, d.log, err)
		return
	}
	// The host's side first, so that a failure is still an HTTP answer.
	hostSide, err := d.tunnel.Open(r.Context(), string(grant.Host), stream.Hello{Workspace: string(grant.Run.Workspace), Epoch: grant.Run.Epoch, Kind: grant.Kind})
	if err != nil {
		refuse(w, d.log, fleet.Wrap(err, fleet.KindUnavailable, "the workspace's host does not open a stream now; try again"))
		return
	}
	userSide, err := stream.Accept(w, r)
	if err != nil {
		_ = hostSide.Close() // nothing was sent on it
		d.log.Debug("upgrade failed", "cause", err)
		return
	}
	who := tunnel.Who{User: string(grant.User), Token: grant.Token, Workspace: string(grant.Run.Workspace), Host: string(grant.Host), Kind: grant.Kind}
	//nolint:contextcheck // the stream outlives the request; Shutdown and the live set end it
	err = d.tunnel.Go(userSide, hostSide, who, func(s stream.Stats, err error) {
		d.log.Debug("stream ended", "workspace", grant.Run.Workspace, "up", s.AToB, "down", s.BToA, "cause", err)
	})
	if err != nil {
		d.log.Debug("stream refused", "workspace", grant.Run.Workspace, "cause", err)
		return
	}
	// Asked again: a revocation before the stream was in the live set would have found nothing to cut.
	if err := d.holds(r.Context(), grant); err != nil {
		d.tunnel.CloseToken(grant.Token, err)
	}
}

// admit takes the ticket; sign-in and workspace are asked again, since a ticket lives for a while.
func (d *userDoor) admit(ctx context.Context, ticket string) (rpc.StreamGrant, error) {
	grant, err := d.tickets.Use(ticket, d.now())
	if err != nil {
		return grant, err
	}
	if err := d.holds(ctx, grant); err != nil {
		return grant, err
	}
	w, err := d.workspaces.Workspace(ctx, grant.Run.Workspace)
	if err != nil {
		return grant, err
	}
	if w.Owner != grant.User || w.Epoch != grant.Run.Epoch || w.State != fleet.StateRunning {
		return grant, fleet.Errorf(fleet.KindConflict, "%s is %s now; try again when it runs", w.Name, w.State)
	}
	return grant, nil
}

// holds reports whether the grant's account and sign-in are still good. KindUnauthenticated.
func (d *userDoor) holds(ctx context.Context, grant rpc.StreamGrant) error {
	user, err := d.users.User(ctx, grant.User)
	if err != nil {
		return err
	}
	if user.Disabled || !user.DeletedAt.IsZero() {
		return fleet.Errorf(fleet.KindUnauthenticated, "the account %s is disabled; ask an admin", user.Name)
	}
	tokens, err := d.users.Tokens(ctx, grant.User)
	if err != nil {
		return err
	}
	now := d.now()
	for _, t := range tokens {
		if t.ID == grant.Token && (t.ExpiresAt.IsZero() || now.Before(t.ExpiresAt)) {
			return nil
		}
	}
	return fleet.Errorf(fleet.KindUnauthenticated, "this sign-in was revoked or has expired; run `carrel login`")
}
