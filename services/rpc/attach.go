package rpc

import (
	"context"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// StreamGrant is what a ticket permits: one byte stream to one run.
type StreamGrant struct {
	Run   fleet.RunKey
	Host  fleet.HostID
	Kind  string // as in the stream's hello
	User  fleet.UserID
	Token string // token id, so that revoking it closes the stream
}

// AttachStore finds what a stream goes to.
type AttachStore interface {
	FindWorkspace(ctx context.Context, owner fleet.UserID, ref string) (fleet.Workspace, error)
	Workspaces(ctx context.Context, filter fleet.WorkspaceFilter) ([]fleet.Workspace, string, error)
	Run(ctx context.Context, key fleet.RunKey) (fleet.Run, error)
}

// Attach serves AttachService.
type Attach struct {
	Store      AttachStore
	Tickets    *auth.Tickets[StreamGrant]
	Links      Links
	HostCA     func() []string // authorized_keys form
	Deployment string
	Now        func() time.Time
}

var _ carrelv1connect.AttachServiceHandler = (*Attach)(nil)

// CreateTicket authorises one byte stream to a running workspace of the caller; an admin attaches to nobody else's.
func (a *Attach) CreateTicket(ctx context.Context, req *connect.Request[carrelv1.CreateTicketRequest]) (*connect.Response[carrelv1.CreateTicketResponse], error) {
	actor := actorOf(ctx)
	if req.Msg.GetKind() != carrelv1.StreamKind_STREAM_KIND_SSH {
		return nil, fleet.Errorf(fleet.KindInvalid, "this gateway opens no streams of kind %d; it may be older than the client", req.Msg.GetKind())
	}
	if owner, _, ok := strings.Cut(req.Msg.GetWorkspace(), "/"); ok && owner != actor.User.Name {
		return nil, fleet.Errorf(fleet.KindForbidden, "only its owner attaches to %s", req.Msg.GetWorkspace())
	}
	w, err := a.Store.FindWorkspace(ctx, actor.User.ID, strings.TrimPrefix(req.Msg.GetWorkspace(), actor.User.Name+"/"))
	if err != nil {
		return nil, err
	}
	if w.State != fleet.StateRunning {
		return nil, notRunning(w)
	}
	run, err := a.Store.Run(ctx, fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch})
	if err != nil {
		return nil, err
	}
	if since := a.Links.UnreachableSince(run.Host); !since.IsZero() {
		return nil, fleet.Errorf(fleet.KindUnavailable, "%s runs, but its host does not answer since %s; try again, or ask an admin", w.Name, since.UTC().Format("15:04:05 MST"))
	}
	grant := StreamGrant{Run: run.Key, Host: run.Host, Kind: "ssh", User: actor.User.ID, Token: actor.Token.ID}
	text, expires, err := a.Tickets.Issue(grant, a.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.CreateTicketResponse{Ticket: text, ExpiresAt: stamp(expires)}), nil
}

// notRunning says what to do about a workspace that cannot be attached to.
func notRunning(w fleet.Workspace) error {
	switch w.State {
	case fleet.StateStopped:
		return fleet.Errorf(fleet.KindConflict, "%s is stopped; run `carrel start %s`", w.Name, w.Name)
	case fleet.StateFailed:
		return fleet.Errorf(fleet.KindConflict, "%s has failed: %s; `carrel show %s` tells more, `carrel start %s` tries again", w.Name, w.Reason.Message, w.Name, w.Name)
	case fleet.StateQueued, fleet.StatePulling, fleet.StateStarting, fleet.StateStopping:
		return fleet.Errorf(fleet.KindConflict, "%s is %s; `carrel up %s` waits until it is ready", w.Name, w.State, w.Name)
	case fleet.StateRunning, fleet.StateDeleted:
	}
	return fleet.Errorf(fleet.KindNotFound, "there is no workspace %s", w.Name)
}

// SshConfig returns what the managed ssh files need.
func (a *Attach) SshConfig(ctx context.Context, _ *connect.Request[carrelv1.SshConfigRequest]) (*connect.Response[carrelv1.SshConfigResponse], error) {
	actor := actorOf(ctx)
	res := &carrelv1.SshConfigResponse{Deployment: a.Deployment, HostCaKeys: a.HostCA()}
	for after := ""; ; {
		page, next, err := a.Store.Workspaces(ctx, fleet.WorkspaceFilter{Owner: actor.User.ID, Limit: largestPage, After: after})
		if err != nil {
			return nil, err
		}
		for _, w := range page {
			res.Hosts = append(res.Hosts, &carrelv1.SshHost{WorkspaceId: string(w.ID), Workspace: w.Name, Login: actor.User.Login, Principal: w.SSHPrincipal()})
		}
		if next == "" {
			return connect.NewResponse(res), nil
		}
		after = next
	}
}

func leaseID(id fleet.LeaseID) string { return strconv.FormatInt(int64(id), 10) }
