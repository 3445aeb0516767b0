package rpc

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/services/fleet"
)

// codes is the only table between fleet's kinds and Connect's codes.
var codes = map[fleet.Kind]connect.Code{
	fleet.KindInvalid:         connect.CodeInvalidArgument,
	fleet.KindUnauthenticated: connect.CodeUnauthenticated,
	fleet.KindForbidden:       connect.CodePermissionDenied,
	fleet.KindNotFound:        connect.CodeNotFound,
	fleet.KindExists:          connect.CodeAlreadyExists,
	fleet.KindConflict:        connect.CodeFailedPrecondition,
	fleet.KindExhausted:       connect.CodeResourceExhausted,
	fleet.KindUnavailable:     connect.CodeUnavailable,
	fleet.KindInternal:        connect.CodeInternal,
}

// wireError turns an error into what a client may see: kind and message, never a cause.
func wireError(err error) error {
	var ours *fleet.Error
	var already *connect.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ours): // first, since its cause may be a host's own Connect error
		return connect.NewError(codes[ours.Kind], errors.New(ours.Message))
	case errors.As(err, &already):
		return already
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, errors.New("the call was cancelled"))
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the call took too long"))
	}
	return connect.NewError(codes[fleet.KindOf(err)], errors.New(fleet.UserMessage(err)))
}

// KindOf turns a client's Connect error back into a kind.
func KindOf(err error) fleet.Kind {
	code := connect.CodeOf(err)
	for kind, c := range codes {
		if c == code {
			return kind
		}
	}
	return fleet.KindInternal
}
