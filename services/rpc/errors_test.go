package rpc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestKindsAndCodesGoBothWays(t *testing.T) {
	for kind := fleet.KindInternal; kind <= fleet.KindUnavailable; kind++ {
		code, ok := codes[kind]
		if !ok {
			t.Errorf("kind %s has no code", kind)
		}
		if back := KindOf(connect.NewError(code, errors.New("x"))); back != kind {
			t.Errorf("%s became %s and came back as %s", kind, code, back)
		}
	}
	if KindOf(connect.NewError(connect.CodeUnimplemented, errors.New("x"))) != fleet.KindInternal {
		t.Error("an unknown code is internal")
	}
}

// A16: causes are for the log. A host's own Connect error as a cause must not take the place of our words.
func TestClientsSeeMessagesAndNeverCauses(t *testing.T) {
	const canary = "canary-4711"
	secret := errors.New(canary)
	hosts := connect.NewError(connect.CodePermissionDenied, secret)
	for name, c := range map[string]struct {
		err  error
		code connect.Code
		text string
	}{
		"plain error":                {secret, connect.CodeInternal, "internal error"},
		"wrapped plain error":        {fmt.Errorf("start workspace: %w", secret), connect.CodeInternal, "internal error"},
		"message with a cause":       {fleet.Wrap(secret, fleet.KindUnavailable, "try again"), connect.CodeUnavailable, "try again"},
		"a host's error as a cause":  {fleet.Wrap(hosts, fleet.KindUnavailable, "the host does not answer"), connect.CodeUnavailable, "the host does not answer"},
		"wrapped twice":              {fmt.Errorf("%s: %w", canary, fleet.Wrap(fmt.Errorf("call: %w", hosts), fleet.KindConflict, "not now")), connect.CodeFailedPrecondition, "not now"},
		"cancelled with a cause":     {fmt.Errorf("%s: %w", canary, context.Canceled), connect.CodeCanceled, "cancelled"},
		"too late with a cause":      {fmt.Errorf("%s: %w", canary, context.DeadlineExceeded), connect.CodeDeadlineExceeded, "too long"},
		"message beside a cancelled": {fleet.Wrap(context.Canceled, fleet.KindUnavailable, "the host was lost"), connect.CodeUnavailable, "the host was lost"},
	} {
		t.Run(name, func(t *testing.T) {
			got := wireError(c.err)
			if connect.CodeOf(got) != c.code || !strings.Contains(got.Error(), c.text) || strings.Contains(got.Error(), canary) {
				t.Errorf("client sees %v", got)
			}
		})
	}
	if wireError(nil) != nil {
		t.Error("no error became one")
	}
}
