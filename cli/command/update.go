package command

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
)

func newUpdate(a *app) *cobra.Command {
	f := specFlags{}
	cmd := &cobra.Command{
		Use:   "update NAME",
		Short: "Change what a workspace gets at its next start",
		Long:  "Takes the flags of `carrel up`. -e and --volume add to what the workspace has, or replace what they name.",
		Args:  exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.update(cmd.Context(), args[0], f)
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	f.register(cmd)
	cmd.Flags().StringArrayVar(&f.unsetEnv, "unset-env", nil, "take `NAME` out of the environment; may be given many times")
	cmd.Flags().StringArrayVar(&f.unsetVolumes, "unset-volume", nil, "no longer mount a volume, by `NAME` or path; may be given many times")
	return cmd
}

func (a *app) update(ctx context.Context, ref string, f specFlags) error {
	change, err := f.parse()
	if err != nil {
		return err
	}
	if len(change.fields)+len(f.unsetEnv)+len(f.unsetVolumes) == 0 {
		return usagef("carrel update: say what to change, such as --memory 64GiB; see `carrel update --help`")
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	has, err := api.workspace(ctx, ref)
	if err != nil {
		return err
	}
	f.merge(&change, has.GetSpec())
	diffs := change.differences(has.GetSpec())
	if len(diffs) == 0 {
		return a.print("%s has all of that already", has.GetName())
	}
	w, err := api.updateSpec(ctx, has, change)
	if err != nil {
		return err
	}
	for _, d := range diffs {
		if err := a.print("%s: %s -> %s", d.flag, d.has, d.wants); err != nil {
			return err
		}
	}
	if p := w.GetPending(); len(p) > 0 {
		a.say("%s takes effect at the next restart: `carrel restart %s`", strings.Join(p, ", "), w.GetName())
	}
	return nil
}
